"""Random jobs on a GPU, compared with the same jobs on this machine's CPU in float32: losses, trained weights, images, memory.

    python3 tests/gpu/random_jobs.py --models FOLDER --aitk target/cuda/release/aitk --seed 1 --count 40
    python3 tests/gpu/random_jobs.py --models FOLDER --device cpu:portable --count 5        # without a GPU

Jobs are drawn as in tests/reference/bench/memory_random.py, over all families, adapters, optimizers, quantisations and memory
profiles, with a dtype each: f32, bf16 or f16. FOLDER gets models with random weights (up to 12 GB). A job is reported as wrong if it
fails on the device only, or differs by more than rounding in its dtype explains. With nvidia-ml-py installed the memory of the whole
process is shown too.

Exit codes: 0 all jobs agree, 1 a job is wrong.
"""
import argparse
import concurrent.futures
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/reference/bench"))
import memory_random  # noqa: E402

DTYPES = ["f32", "bf16", "bf16", "f16"]
PROFILES = ["full_gpu", "balanced", "gpu_poor", "extreme"]
# Largest differences that rounding explains: of a loss, relative; of a mean image, in units of 1/255.
LOSS = {"f32": 1e-3, "f16": 0.01, "bf16": 0.05}
# Random models amplify rounding: with guidance an image of a LoRA of three steps differs by up to 2.4 in f16, on a CPU and on a card.
IMAGE = {"f32": 0.2, "f16": 3.0, "bf16": 4.0}
GIB = 1 << 30
# In the error of a job that took too long.
LATE = "not done after"


def draw(seed):
    """A job, with its dtype and its profile on a GPU."""
    r = random.Random(f"gpu-{seed}")
    job = memory_random.draw_job(seed, has_transformer=r.random() < 0.5)
    job["dtype"], job["profile"] = r.choice(DTYPES), r.choice(PROFILES)
    process = job["process"]
    for section in ("sample", "generate"):
        if section in process:
            process[section]["seed"] = 42
    if job["images"]:
        process["training_seed"] = 42
        # So that the loss of a later step shows what the optimizer did.
        process["train"]["steps"] = max(3, process["train"]["steps"])
        process["train"]["lr"] = 1e-4
        process["logging"] = {"log_every": 1}
    return job


def with_dtype(job, dtype):
    """The same job in another dtype."""
    job = json.loads(json.dumps(job))
    process = job["process"]
    section = process["train"] if job["images"] else process["model"]
    section["dtype"] = dtype
    return job


def tensors(path):
    """The tensors of a safetensors file as lists of floats."""
    data = Path(path).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, found = json.loads(data[8 : 8 + length]), {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "F32":
            found[name] = array("f", raw)
        elif entry["dtype"] == "F16":
            found[name] = struct.unpack(f"<{len(raw) // 2}e", raw)
        elif entry["dtype"] == "BF16":
            words = array("H", raw)
            found[name] = array("f", struct.pack(f"<{len(words)}I", *(word << 16 for word in words)))
    return found


def cosine(ours, theirs):
    """The cosine between all trained weights of two files: the up matrices of a LoRA, which start at zero."""
    a, b = tensors(ours), tensors(theirs)
    if a.keys() != b.keys():
        return math.nan
    names = [name for name in a if ".lora_B." in name or "lora_up" in name]
    dot = sum(sum(map(float.__mul__, map(float, a[n]), map(float, b[n]))) for n in names)
    norm = math.sqrt(sum(sum(float(x) ** 2 for x in a[n]) for n in names) * sum(sum(float(x) ** 2 for x in b[n]) for n in names))
    return dot / norm if norm else math.nan


class ProcessMemory:
    """The most memory that a process and its children took on the first GPU, as the driver reports it."""

    def __init__(self, process):
        self.process, self.most, self.is_over = process, None, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        try:
            import psutil
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # noqa: BLE001 - without the libraries there is no figure
            return
        while not self.is_over.wait(0.02):
            try:
                pids = {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except Exception:  # noqa: BLE001 - the process has ended
                continue
            taken = max((entry.usedGpuMemory or 0 for entry in running if entry.pid in pids), default=0)
            self.most = max(self.most or 0, taken)

    def end(self):
        self.is_over.set()
        self.thread.join()
        return self.most


def write_data(job, folder):
    """Writes the images of a job's data sets, with captions, into `folder`."""
    for index, width, height, count in job["images"]:
        os.makedirs(f"{folder}/data{index}")
        for i in range(count):
            memory_random.write_png(f"{folder}/data{index}/{i}.png", width, height)
            Path(f"{folder}/data{index}/{i}.txt").write_text(f"a zorb {i}")


def run_config(given, config, folder, device, threads=None):
    """Runs a config: its events, its error, the bytes that the process took on the card, its seconds."""
    Path(folder, "job.json").write_text(json.dumps(config))
    environment = {**os.environ, "XDG_STATE_HOME": f"{folder}/state"}
    if threads:
        environment["RAYON_NUM_THREADS"] = str(threads)
    command = [given.aitk, "run", f"{folder}/job.json", "--device", device, "--json"]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        memory = ProcessMemory(process)
        try:
            out, complaint = process.communicate(timeout=given.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            out, complaint = process.communicate()
            complaint += f"\n{LATE} {given.limit} s"
        total = memory.end()
    error = None if process.returncode == 0 else (complaint.strip() or out)[-600:]
    return [json.loads(line) for line in out.splitlines()], error, total, time.monotonic() - began


def run(given, job, folder, device, threads):
    """What a job gives on a device. The images are in the parent of `folder`."""
    os.makedirs(folder)
    for index, *_ in job["images"]:
        os.symlink(f"../data{index}", f"{folder}/data{index}")
    model = memory_random.make_model(given.models, job["model"])
    if not device.startswith(given.device):
        job = {**job, "profile": "cpu_only"}
    events, error, total, seconds = run_config(given, memory_random.config_of(job, folder, model), folder, device, threads)
    result = {"seconds": seconds, "losses": [], "images": [], "files": [], "memory": {}, "phases": "", "notes": [], "process": total, "error": error}
    for event in events:
        if event.get("event") == "log" and event.get("message", "").startswith("device memory"):
            result["phases"] = event["message"]
        if event.get("event") == "log" and "not computing in" in event.get("message", ""):
            result["notes"].append(event["message"])
        if event.get("event") == "metrics":
            values = event["values"]
            if "loss/loss" in values:
                result["losses"].append(float(values["loss/loss"]))
            result["memory"].update({k: v for k, v in values.items() if k.startswith("memory/")})
    for path in sorted(Path(folder, "out").rglob("*")):
        if path.suffix in (".jpg", ".jpeg", ".png", ".webp"):
            result["images"].append(str(path))
        elif path.suffix == ".safetensors":
            result["files"].append(str(path))
    return result


def image_difference(ours, theirs):
    """The largest mean difference of a pair of images, in units of 1/255."""
    from PIL import Image, ImageChops, ImageStat

    most = 0.0
    for a, b in zip(ours, theirs):
        difference = ImageChops.difference(Image.open(a).convert("RGB"), Image.open(b).convert("RGB"))
        most = max(most, *ImageStat.Stat(difference).mean)
    return most


def compare(job, found, expected):
    """The figures of a job, and what is wrong with it."""
    row, wrong = {"dtype": job["dtype"], "seconds": round(found["seconds"], 1)}, []
    if expected["error"]:
        # The job cannot be run anywhere (a random combination that is refused), or only on a GPU.
        row["cpu"] = expected["error"]
        return row, [] if found["error"] or LATE in expected["error"] else ["runs on the device only"]
    if found["error"]:
        return row, [f"fails: {found['error']}"]
    wrong += found["notes"]
    if len(found["losses"]) != len(expected["losses"]) or len(found["images"]) != len(expected["images"]):
        wrong.append(f"{len(found['losses'])} losses, {len(found['images'])} images, on the CPU {len(expected['losses'])}, {len(expected['images'])}")
    pairs = list(zip(found["losses"], expected["losses"]))
    if pairs:
        row["loss"] = max(abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs)
        if not row["loss"] <= LOSS[job["dtype"]]:
            wrong.append(f"losses {[round(a, 6) for a, _ in pairs]}, on the CPU {[round(b, 6) for _, b in pairs]}")
    if found["images"]:
        row["image"] = image_difference(found["images"], expected["images"])
        if not row["image"] <= IMAGE[job["dtype"]]:
            wrong.append(f"images differ by {row['image']:.2f}/255 on average")
    if job["process"].get("network") and found["files"] and expected["files"]:
        row["cosine"] = cosine(found["files"][-1], expected["files"][-1])
    return row, wrong


def memory_row(found):
    """What a job took on the device, in GiB, beside what was predicted."""
    memory = found["memory"]
    return {
        "predicted": memory.get("memory/predicted_gib"),
        "allocated": memory.get("memory/device_peak_gib"),
        "taken": memory.get("memory/device_process_gib"),
        # What the driver reports: less, if the peak was between two questions.
        "on_card": found["process"] and found["process"] / GIB,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="where the models lie, or are made")
    parser.add_argument("--aitk", default=str(ROOT / "target/cuda/release/aitk"), help="the program")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1, help="the first seed; each job has its own")
    parser.add_argument("--count", type=int, default=20, help="how many jobs")
    parser.add_argument("--only", action="append", help="leave out jobs of models without this in their names")
    parser.add_argument("--seconds", type=float, default=3600, help="start no job after this time")
    parser.add_argument("--limit", type=float, default=300, help="most seconds of one job")
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run side by side")
    parser.add_argument("--memory", action="store_true", help="run the jobs on the device only, and compare only their memory")
    parser.add_argument("--save", type=Path, help="append each result to this file, as JSON")
    given = parser.parse_args()
    drawn = {seed: draw(seed) for seed in range(given.seed, given.seed + given.count)}
    jobs = {seed: job for seed, job in drawn.items() if not given.only or any(part in job["model"] for part in given.only)}
    for model in sorted({job["model"] for job in jobs.values()}):
        memory_random.make_model(given.models, model)
    end = time.monotonic() + given.seconds
    threads = max(1, (os.cpu_count() or 2) // (2 * given.at_once))

    def both(seed):
        if time.monotonic() > end:
            return None
        job = jobs[seed]
        with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pair:
            write_data(job, folder)
            found = pair.submit(run, given, with_dtype(job, job["dtype"]), f"{folder}/gpu", given.device, threads)
            if given.memory:
                found = found.result()
                row = {"dtype": job["dtype"], "phases": found["phases"], "error": found["error"]}
                return {**row, **memory_row(found)}, found["notes"]
            expected = pair.submit(run, given, with_dtype(job, "float32"), f"{folder}/cpu", "cpu", threads)
            row, wrong = compare(job, found.result(), expected.result())
            return {**row, **memory_row(found.result())}, wrong

    wrong_jobs, done, over = 0, 0, []
    with concurrent.futures.ThreadPoolExecutor(given.at_once) as pool:
        for seed, outcome in zip(jobs, pool.map(both, jobs)):
            if outcome is None:
                continue
            row, wrong = outcome
            done += 1
            wrong_jobs += bool(wrong)
            if row.get("predicted") and row.get("taken"):
                over.append(row["predicted"] / row["taken"] - 1)
            figures = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if v is not None)
            print(f"{seed}: {'WRONG: ' + '; '.join(wrong) if wrong else 'right'}: {figures}: {memory_random.describe(jobs[seed])[:300]}", flush=True)
            if given.save:
                with open(given.save, "a") as out:
                    out.write(json.dumps({**jobs[seed], **row, "wrong": wrong}) + "\n")
    print(f"{wrong_jobs} of {done} jobs are wrong")
    if over:
        within = sum(-0.05 <= one <= 0.10 for one in over)
        print(f"memory: {within} of {len(over)} predicted within -5 and +10 %, {100 * min(over):+.0f} to {100 * max(over):+.0f} %, mean {100 * sum(over) / len(over):+.1f} %")
    sys.exit(1 if wrong_jobs else 0)


if __name__ == "__main__":
    main()
