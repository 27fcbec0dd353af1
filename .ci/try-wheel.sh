#!/bin/sh
# Installs the wheel of WORK/dist into a bare environment and runs the README's Python from there: try-wheel.sh PYTHON WORK
set -eu

readme=$(cd "$(dirname "$0")/.." && pwd)/README.md
python=$1
work=$(cd "$2" && pwd)
unset PYTHONPATH

"$python" -m zipfile -l "$work"/dist/*.whl | grep -q 'metapretrain/py.typed'
"$python" -m venv "$work/bare"
"$work/bare/bin/python" -m pip install -qq --no-compile "$work"/dist/*.whl
cd "$work"  # not the checkout, whose folder would be imported
"$work/bare/bin/metapretrain" --version
"$work/bare/bin/python" - "$readme" <<'PYTHON'
import re
import sys
from pathlib import Path

import metapretrain

assert "site-packages" in metapretrain.__file__, metapretrain.__file__
blocks = re.findall(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
assert any("load_digits" in block for block in blocks), "the README has no example on digits"
names = {"__name__": "readme"}
for number, block in enumerate(blocks, start=1):
    exec(compile(block, f"README.md, block {number}", "exec"), names)
PYTHON
rm -rf "$work/bare"
