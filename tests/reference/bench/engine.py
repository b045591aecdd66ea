"""`aitk bench engine` and the same work in PyTorch (diffusers, transformers, peft), in turns on this machine; a table.

    cargo build --release --bin aitk
    python tests/reference/bench/engine.py                                   # everything: more than an hour on two cores
    python tests/reference/bench/engine.py --only unet_sd15_forward_64 --repeat 5
    python tests/reference/bench/engine.py --json > engine.json

Both sides: the same device and dtype (by default the CPU and float32), random weights, the same shapes and number of
threads, no gradients in forward passes. With --compile models of PyTorch go through `torch.compile` first.
Each measurement is a process of its own, first aitk, then PyTorch, and so on, so that a machine that gets slower does so
for both and that peak memory is that of one work alone. Both make weights and inputs first, run once uncounted, then time
runs for three seconds, at least three, and say the median. The table has the median and the least of the processes.

The ratio is PyTorch's seconds by aitk's: 1 is equal, more is faster than PyTorch.

Other programs spoil a measurement. What they took of the CPUs meanwhile is in the last column (some of it may have
been idle anyway); with --quiet each process waits until they take little.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time

import pytorch_benchmarks

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MOST_REPEATS = 50
# A machine counts as quiet when others take less than this part of its CPUs.
LITTLE = 0.05


class Failure(Exception):
    """One clear message, then the end."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def program(given):
    """Where aitk is."""
    built = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release/aitk"
    found = given or (str(built) if built.exists() else shutil.which("aitk"))
    if not found or not shutil.which(found):
        raise Failure(
            f"no program at {given}" if given else
            f"no aitk in {built.parent} and none on the PATH: `cargo build --release --bin aitk`, or --aitk PROGRAM")
    return found


def known(aitk):
    """What this aitk can measure: {name: operations}."""
    done = subprocess.run([aitk, "bench", "engine", "--list", "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Failure(f"{aitk} has no `bench engine --list --json` (status {done.returncode})")
    try:
        return {work["work"]: work["flops"] for work in json.loads(done.stdout)}
    except (ValueError, LookupError, TypeError):
        raise Failure(f"{aitk} did not print a list of works for `bench engine --list --json`") from None


def chosen(only, listed):
    """The works with these names, or with these in their names, as `aitk bench engine --only` has it."""
    for name in listed:
        if name not in pytorch_benchmarks.WORKS:
            say(f"{name}: left out, nobody wrote it in PyTorch yet (tests/reference/bench/pytorch_benchmarks.py)")
    for name in pytorch_benchmarks.WORKS:
        if name not in listed:
            say(f"{name}: left out, this aitk does not have it")
    names = [name for name in pytorch_benchmarks.WORKS if name in listed]
    if not only:
        return names
    picked = set()
    for part in only:
        some = {part} if part in names else {name for name in names if part in name}
        if not some:
            raise Failure(f"--only: no work has `{part}` in its name; there are: {', '.join(names)}")
        picked |= some
    return [name for name in names if name in picked]


def ours():
    """Seconds of CPU time of all processes that this one started and that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def wait_for_quiet(limit):
    """Until others take little, at most so many seconds."""
    end = time.monotonic() + limit
    while pytorch_benchmarks.busy() is not None and time.monotonic() < end:
        before, began = pytorch_benchmarks.busy(), time.monotonic()
        time.sleep(1)
        if (pytorch_benchmarks.busy() - before) / (time.monotonic() - began) / os.cpu_count() < LITTLE:
            return


def spawn(command, args):
    """What one process found, with the part of the CPUs that others took while it ran."""
    if args.quiet:
        wait_for_quiet(args.quiet)
    threads = str(args.threads)
    env = os.environ | {
        "RAYON_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    before, mine, began = pytorch_benchmarks.busy(), ours(), time.monotonic()
    # A session of its own: aitk measures in a child, and both have to go when they take too long.
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True)
    try:
        said, complaint = child.communicate(timeout=args.limit)
    except subprocess.TimeoutExpired:
        raise Failure(f"not done after {args.limit} s (--limit)") from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if child.returncode != 0:
        last = complaint.strip().rpartition("\n")[2]
        raise Failure(f"ended with status {child.returncode}{': ' if last else ''}{last}")
    try:
        found = json.loads(said)[0]
    except (ValueError, LookupError):
        raise Failure("did not print what it found") from None
    took = time.monotonic() - began
    # Loading PyTorch from a disk is waiting: its process tells what others took while it computed.
    if "others" not in found:
        found["others"] = None if before is None else max(0.0, pytorch_benchmarks.busy() - before - (ours() - mine)) / took / os.cpu_count()
    return found


def side(found):
    seconds = [one["seconds"] for one in found]
    return {
        "seconds": seconds, "median": statistics.median(seconds), "least": min(seconds),
        "peak_bytes": max(one["peak_bytes"] for one in found),
        "base_bytes": max(one.get("base_bytes", 0) for one in found)}


def compare(name, operations, aitk, args):
    """One work, in turns."""
    commands = {
        "aitk": [aitk, "bench", "engine", "--device", args.device, "--dtype", args.dtype, "--only", name, "--json"],
        "pytorch": [
            sys.executable, str(HERE / "pytorch_benchmarks.py"), name, "--threads", str(args.threads),
            "--device", args.device, "--dtype", args.dtype, *(["--compile"] if args.compile else [])]}
    found = {who: [] for who in commands}
    for turn in range(args.repeat):
        for who, command in commands.items():
            try:
                found[who].append(spawn(command, args))
            except Failure as failure:
                raise Failure(f"{name}: {who}: {failure}") from None
            last = found[who][-1]
            say(f"{name} {turn + 1}/{args.repeat} {who}: {last['seconds']:.4f} s, {last['peak_bytes'] / 2**30:.2f} GiB")
    sides = {who: side(some) for who, some in found.items()}
    others = [one["others"] for some in found.values() for one in some if one["others"] is not None]
    return {
        "work": name, "shape": pytorch_benchmarks.WORKS[name][0], "flops": operations, **sides,
        "ratio": sides["pytorch"]["median"] / sides["aitk"]["median"],
        "ratio_of_least": sides["pytorch"]["least"] / sides["aitk"]["least"],
        "others": max(others, default=None)}


def line(row):
    def cell(of):
        digits = 2 if of["median"] >= 1 else 3 if of["median"] >= 0.1 else 4
        return f"{of['median']:.{digits}f} ({of['least']:.{digits}f})"

    ours_, theirs = row["aitk"], row["pytorch"]
    others = "" if row["others"] is None else f"{row['others']:.0%}"
    return (
        f"| `{row['work']}` | {row['shape']} | {cell(ours_)} | {cell(theirs)} | {row['ratio']:.2f} ({row['ratio_of_least']:.2f}) | "
        f"{ours_['peak_bytes'] / 2**30:.2f} | {theirs['peak_bytes'] / 2**30:.2f} | {others} |")


HEAD = (
    "| work | shape | aitk, s: median (least) | PyTorch, s | PyTorch / aitk | aitk, GiB | PyTorch, GiB | other load |\n"
    "|---|---|---|---|---|---|---|---|")


def libraries():
    """What the other side is, by version; all of it has to be there before anything is measured."""
    from importlib.metadata import PackageNotFoundError, version
    try:
        return ", ".join(f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers", "peft", "safetensors"))
    except PackageNotFoundError as missing:
        raise Failure(f"Python has no {missing.name}: pip install -r tests/reference/requirements.txt") from None


def notes(rows):
    base = max((row["pytorch"]["base_bytes"] for row in rows), default=0)
    return [f"Of PyTorch's memory {base / 2**30:.2f} GiB is what `import torch` alone takes."] if base else []


def machine():
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [one for one in info.read_text().splitlines() if one.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return f"{cpu}, {cores()} cores"


def check_flops(names, listed):
    """Whether aitk counts as PyTorch does."""
    wrong = 0
    for name in names:
        theirs = pytorch_benchmarks.flops(name)
        wrong += theirs != listed[name]
        print(f"{name} {theirs}{'' if theirs == listed[name] else f', but aitk says {listed[name]}'}", flush=True)
    return 1 if wrong else 0


def arguments():
    def number(least, most, kind=int):
        def read(text):
            value = kind(text)
            if not least <= value <= most:
                raise argparse.ArgumentTypeError(f"{text}: from {least} to {most}")
            return value
        return read

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aitk", metavar="PROGRAM", help="default: target/release/aitk, else the one on the PATH")
    parser.add_argument("--only", metavar="NAME", action="append", help="this work, or all with this in their name; several times")
    parser.add_argument("--repeat", metavar="N", type=number(1, MOST_REPEATS), default=3, help="processes of each side (3)")
    parser.add_argument("--threads", metavar="N", type=number(1, 1024), default=cores(), help="of both sides (all cores)")
    parser.add_argument("--device", metavar="DEVICE", default="cpu", help="cpu, cuda (cpu)")
    parser.add_argument(
        "--dtype", metavar="DTYPE", default="float32", choices=pytorch_benchmarks.DTYPES,
        help="float32, bf16, float16; aitk computes in float32 on a CPU")
    parser.add_argument("--compile", action="store_true", help="compile the models of PyTorch")
    parser.add_argument("--limit", metavar="SECONDS", type=number(1, 86400), default=900, help="for one process (900)")
    parser.add_argument(
        "--quiet", metavar="SECONDS", type=number(0, 86400), default=0,
        help=f"before each process wait until others take under {LITTLE:.0%}% of the CPUs, at most this long (0)")
    parser.add_argument("--table", metavar="FILE", type=pathlib.Path, help="write the table there, not to standard output")
    parser.add_argument("--json", action="store_true", help="everything that was measured, instead of the table")
    parser.add_argument("--flops", action="store_true", help="only compare how many operations both count; no arithmetic")
    return parser.parse_args()


def run(args):
    aitk, theirs = program(args.aitk), libraries()
    listed = known(aitk)
    names = chosen(args.only, listed)
    if args.flops:
        return check_flops(names, listed)
    rows, failures = [], []
    for name in names:
        try:
            rows.append(compare(name, listed[name], aitk, args))
        except Failure as failure:
            failures.append(str(failure))
            say(str(failure))
    today = str(datetime.date.today())
    if args.json:
        text = json.dumps({
            "date": today, "machine": machine(), "libraries": theirs, "threads": args.threads, "repeat": args.repeat,
            "works": rows, "failures": failures}, indent=2) + "\n"
    else:
        text = "\n".join([
            f"{today}, {machine()}; {theirs}{' compiled' if args.compile else ''}; {args.device}, {args.dtype}, {args.threads} threads, {args.repeat} processes of each in turns:", "",
            HEAD, *map(line, rows), "", *notes(rows), *(f"Not measured: {failure}" for failure in failures)]) + "\n"
    if args.table:
        args.table.write_text(text)
    else:
        print(text, end="")
    return 1 if failures else 0


def main():
    try:
        return run(arguments())
    except Failure as failure:
        say(f"engine.py: {failure}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
