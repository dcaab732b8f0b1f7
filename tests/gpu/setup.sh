# Miles and its plugins into the Python of a GPU host that has no network; pip would take three minutes for it.
#   SITE=folder of the unpacked stack  WHEELS=folder of what else the plugins need (math-verify)
#   . tests/gpu/setup.sh
export PYTHONPATH="${SITE:?folder of the unpacked stack}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
if [ -n "$WHEELS" ]; then python3 -m pip install -q --no-index --no-deps --target "$SITE" "$WHEELS"/*.whl; fi
python3 tests/gpu/link.py "$SITE"
