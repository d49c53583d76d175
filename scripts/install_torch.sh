#!/bin/sh
# Installs torch for the Python given as $1. Without an NVIDIA GPU the small CPU build is tried first, from PyTorch's own
# index; where that cannot be reached, PyPI's build is taken, which on Linux carries CUDA (several GB).
# TORCH_SPEC overrides what is installed, e.g. TORCH_SPEC='torch==2.10.0'.
set -eu
python=$1
spec=${TORCH_SPEC:-torch==2.13.0}
cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*" >&2; }

gpu=no
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then gpu=yes; fi

# A torch that is there already is kept, unless there is a GPU that it cannot use.
if "$python" - "$gpu" <<'CHECK'
import sys
try:
    import torch
except ImportError:
    sys.exit(1)
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
usable = (2, 9) <= version < (2, 15) and (sys.argv[1] == "no" or torch.version.cuda is not None)
sys.exit(0 if usable else 1)
CHECK
then
    say "torch is installed already"
    exit 0
fi

if [ "$gpu" = yes ]; then
    say "an NVIDIA GPU is present: installing $spec with CUDA (several GB)"
    exec "$python" -m pip install --disable-pip-version-check "$spec"
fi
say "no NVIDIA GPU: trying the CPU build of $spec from $cpu_index"
# --no-deps keeps this to one look-up, so that an index out of reach costs seconds; the rest comes with offroad itself.
if "$python" -m pip install --quiet --disable-pip-version-check --no-deps --retries 0 --timeout 5 --index-url "$cpu_index" "$spec" 2>/dev/null
then
    exit 0
fi
say "that index cannot be reached or has no build for this machine: installing $spec from the default index"
say "on Linux this may be the CUDA build (several GB)"
exec "$python" -m pip install --disable-pip-version-check "$spec"
