# Miles and its plugins into the Python of a GPU host that has no network.
#   SITE=folder of the unpacked stack  WHEELS=folder of what else the plugins need (math-verify)
#   . tests/gpu/setup.sh
export PYTHONPATH="${SITE:?folder of the unpacked stack}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
python3 -m pip install -q --no-index --no-deps --no-build-isolation --break-system-packages \
  ${WHEELS:+"$WHEELS"/*.whl} -e . $(for p in plugins/miles-*; do echo -e "./$p"; done)
