#!/usr/bin/env bash
# From wheels to a first measured step: benchmarks/bootstrap.sh WHEELS_DIR [ENVIRONMENT]
#
# Makes ENVIRONMENT (default: .venv-gpu) beside the Python that this machine has, whose torch it uses, installs every wheel
# of WHEELS_DIR into it and this checkout with them, without a network, and runs one SFT benchmark on the tiny model.
# PYTHON names another interpreter. A package that the machine has already is found too; a wheel goes before it.
set -euo pipefail
wheels=$(cd "${1:?usage: benchmarks/bootstrap.sh WHEELS_DIR [ENVIRONMENT]}" && pwd)
cd "$(dirname "$0")/.."
environment=${2:-.venv-gpu}
python=${PYTHON:-python3}

"$python" -m venv --without-pip --clear "$environment"
mine=$environment/bin/python
# an environment made from an environment sees only the first Python's packages: name this one's too
site=$("$mine" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$site/machine.pth"

install() { "$python" -m pip --python "$mine" install --quiet --no-index --no-deps --no-cache-dir --no-compile "$@"; }
install --ignore-installed "$wheels"/*.whl
install --no-build-isolation --editable .

"$mine" - <<'CHECK'
import torch, transformers, trl
import coepg_dagster.assets.loop  # the whole of coepg-dagster
print(f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}, "
      f"{torch.cuda.device_count()} GPUs", flush=True)
CHECK
exec "$mine" -m benchmarks.sft_mfu --quick
