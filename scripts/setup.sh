#!/bin/sh
# Makes .venv and installs offroad in it. Usage: scripts/setup.sh [EXTRA,...]   (e.g. demo or test)
# Quick when nothing has changed: a stamp in .venv names the extras and the pyproject.toml that were installed.
set -eu
cd "$(dirname "$0")/.."
extras=${1:-demo}
python=${PYTHON:-python3}
venv=.venv

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

command -v "$python" >/dev/null 2>&1 || fail "no $python on PATH; install Python 3.11, 3.12 or 3.13, or name one: make PYTHON=/path/to/python3.12"

# Without a C compiler the CPU kernels are compiled by the one in the ziglang package.
if [ -z "${CC:-}" ] && ! command -v cc >/dev/null 2>&1 && ! command -v gcc >/dev/null 2>&1 && ! command -v clang >/dev/null 2>&1; then
    say "no C compiler found: installing ziglang, which brings one"
    extras="$extras,cc"
fi

stamp="$venv/offroad-installed"
wanted="$extras $(cksum < pyproject.toml) $(cksum < scripts/install_torch.sh) ${TORCH_SPEC:-}"
if [ -x "$venv/bin/offroad" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

"$python" - <<'CHECK' || exit 1
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"setup: {sys.executable} is Python {sys.version.split()[0]}; offroad needs 3.11, 3.12 or 3.13. "
             "Name another one: make PYTHON=/path/to/python3.12")
CHECK
if [ ! -x "$venv/bin/python" ]; then
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv" || fail "python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
fi
sh scripts/install_torch.sh "$venv/bin/python"
say "installing offroad with extras: $extras"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
printf '%s\n' "$wanted" > "$stamp"
say "done; the command is $venv/bin/offroad"
