set -o pipefail
cd .cuda
export PYTHONUNBUFFERED=1
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -2
export PYTHONPATH=/tmp/site
FE=$(dirname $(find /tmp/site -name cudnn_frontend.h | head -1))
t0=$(date +%s)
if ls .prebuilt/*.xz >/dev/null 2>&1; then
  mkdir -p /tmp/new/llmc_cuda; for f in .prebuilt/*.xz; do xz -dc $f > /tmp/new/llmc_cuda/$(basename $f .xz); done
else
  cmake -G Ninja -S csrc -B /tmp/b -DCMAKE_CUDA_ARCHITECTURES=90 -DSKBUILD_PROJECT_VERSION_FULL=0.1.0 -DPython_EXECUTABLE=$(which python3) -DCMAKE_INSTALL_PREFIX=/tmp/new -DCUDNN_FRONTEND_INCLUDE=$FE > /tmp/cm.log 2>&1 || tail -20 /tmp/cm.log
  ninja -C /tmp/b -j18 2>&1 | grep -E "error|FAILED" | head
  cmake --install /tmp/b > /dev/null
fi
cp csrc/llmc_cuda/*.py /tmp/new/llmc_cuda/
ls /tmp/new/llmc_cuda; echo "build $(( $(date +%s) - t0 )) s"
export PYTHONPATH=$PWD:$PWD/tests:/tmp/site:/tmp/new
