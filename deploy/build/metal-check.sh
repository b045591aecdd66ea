#!/usr/bin/env bash
# Checks that aitk with Metal compiles (cargo check, no programs). On a Mac it uses cargo; on Debian it uses tools that it installs
# into the target folder, without root and without changing the system.
#
#   deploy/build/metal-check.sh          the programs aitk and aitk-worker
#   deploy/build/metal-check.sh --ci     only engine and processes (the engine has the feature); skipped if nothing has changed
#
# CARGO_TARGET_DIR as for cargo. Exit codes: 0 done, 1 the code does not compile, 3 the tools cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/../.."

say() { printf 'metal-check.sh: %s\n' "$*" >&2; }

target=${CARGO_TARGET_DIR:-$PWD/target}
tools=$target/gpu-tools
triple=aarch64-apple-darwin
rust=$tools/rust-web
zig=$tools/zig

packages=(-p aitk -p aitk-worker --features 'aitk/metal,aitk-worker/metal')
[ "${1:-}" != --ci ] || packages=(-p aitk-processes -p aitk-engine --features aitk-engine/metal)

if [ "$(uname)" = Darwin ]; then
  # To build the programs: `cargo build --release --features metal`.
  exec cargo check --release --locked "${packages[@]}"
fi

libraries=$rust/usr/lib/$(uname -m)-linux-gnu:$rust/lib/$(uname -m)-linux-gnu

# Whether the unpacked compiler runs here, and is as new as Cargo.toml wants.
rust_works() {
  local wanted found
  wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  [ -x "$rust/usr/bin/cargo" ] || return 1
  found=$(LD_LIBRARY_PATH=$libraries "$rust/usr/bin/cargo" --version | cut -d' ' -f2) || return 1
  [ "$(printf '%s\n' "$wanted" "$found" | sort -V | head -n 1)" = "$wanted" ] && return 0
  say "rustc-web is $found, and aitk needs $wanted"
  return 1
}

# Debian's rustc-web has the source of the standard library, so that it can be checked for a Mac too. Its packages are only unpacked,
# not installed.
install_rust() {
  ! rust_works || return 0
  command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
  local names=(rustc-web cargo-web rust-web-src) wanted
  # An old list names an old compiler.
  [ "$(id -u)" != 0 ] || timeout 120 apt-get update -qq || say "the list of Debian's packages could not be updated"
  # The packages, and those of their dependencies that are not installed.
  mapfile -t wanted < <(apt-get install --simulate --no-install-recommends --reinstall "${names[@]}" | sed -n 's/^Inst \([^ ]*\).*/\1/p')
  [ "${#wanted[@]}" -ge 3 ] || return 1
  say "unpacking Debian's rustc-web into $rust"
  rm -rf "$rust" "$rust.new" && mkdir -p "$rust.new/packages" || return 1
  (cd "$rust.new/packages" && timeout 600 apt-get download -qq "${wanted[@]}" 2>/dev/null) || return 1
  local package
  for package in "$rust.new"/packages/*.deb; do
    dpkg -x "$package" "$rust.new" || return 1
  done
  rm -r "$rust.new/packages" && mv "$rust.new" "$rust" && rust_works
}

# zig is a C compiler with macOS' headers: some crates compile C. Cargo's crates call it as they would call Apple's.
install_zig() {
  [ ! -x "$zig/cc" ] || return 0
  say "installing zig from PyPI into $zig"
  python3 -m venv "$zig" && "$zig/bin/pip" install --quiet --disable-pip-version-check 'ziglang==0.*' || return 1
  printf '#!/bin/sh\nexec "%s" -m ziglang ar "$@"\n' "$zig/bin/python" >"$zig/ar"
  cat >"$zig/cc.new" <<END
#!/bin/bash
# zig names the target in its own way.
keep=()
for word; do
  case \$word in --target=* | -mmacosx-version-min=* | -mmacos-version-min=*) ;; *) keep+=("\$word") ;; esac
done
exec "$zig/bin/python" -m ziglang cc -target aarch64-macos "\${keep[@]}"
END
  chmod +x "$zig/ar" "$zig/cc.new" && mv "$zig/cc.new" "$zig/cc"
}

# Hashes all inputs of the --ci check.
fingerprint() {
  {
    cat deploy/build/metal-check.sh Cargo.lock Cargo.toml
    find common kernels engine -type f ! -path '*/tests/*' -print0 | sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d' ' -f1
}

if [ "${1:-}" = --ci ]; then
  now=$(fingerprint)
  if [ "$(cat "$tools/metal-checked" 2>/dev/null)" = "$now" ]; then
    say "the sources have not changed since the last check"
    exit 0
  fi
fi

mkdir -p "$tools"
if ! install_rust || ! install_zig; then
  say "Metal cannot be checked: this needs Debian's packages rustc-web, cargo-web and rust-web-src, and ziglang from PyPI"
  exit 3
fi

# A wrapper for the compiler, so that LD_LIBRARY_PATH is set for the compiler only.
cat >"$tools/rustc-web" <<END
#!/bin/sh
LD_LIBRARY_PATH="$libraries" exec "$rust/usr/bin/rustc" "\$@"
END
chmod +x "$tools/rustc-web"

# Building the standard library needs an unstable flag, which RUSTC_BOOTSTRAP allows.
env RUSTC_BOOTSTRAP=1 RUSTC="$tools/rustc-web" LD_LIBRARY_PATH="$libraries" \
  CC_aarch64_apple_darwin="$zig/cc" AR_aarch64_apple_darwin="$zig/ar" \
  CARGO_TARGET_DIR="$target/metal-check" "$rust/usr/bin/cargo" check -Zbuild-std --release --locked --target "$triple" "${packages[@]}"

[ "${1:-}" != --ci ] || printf '%s\n' "$now" >"$tools/metal-checked"
