"""A rank of test_launchers.py: ``launched.py FOLDER WORDS...`` leaves what it has to tell in FOLDER/<rank>.json."""

import json
import os
import sys
from pathlib import Path

from harness.launched import report

STEPS = 20  # plans are made again in some of them

folder, *words = sys.argv[1:]
told = {**report(STEPS), "words": words, "directory": os.getcwd()}
(Path(folder) / f"{told['rank']}.json").write_text(json.dumps(told))
