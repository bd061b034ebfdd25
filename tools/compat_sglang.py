"""Which SGLang versions `make compat` runs, in which environments, and with which tests.

    python -m tools.compat_sglang [VERSION ...]      prints a row of docs/compatibility.md for each

All run on one torch, the one of requirements/sglang-cpu.txt, which for most is newer than the one they pin;
each gets the transformers that it pins.
"""

import os
import subprocess
import sys

from tools.env import CHECKOUT, environment, say

#: The transformers that each version pins. Of a version with fixes only the last is there.
TRANSFORMERS = {
    "0.5.11": "5.6.0",
    "0.5.12.post1": "5.6.0",
    "0.5.13.post1": "5.8.1",
    "0.5.14": "5.8.1",
    "0.5.15.post1": "5.12.1",
    "0.5.16": "5.12.1",
    "0.5.17": "5.12.1",
    "0.5.18": "5.12.1",
    "0.5.19": "5.12.1",
    "0.5.20": "5.12.1",
    "0.5.21": "5.12.1",
    "0.5.22": "5.19.0",
    "0.5.23": "5.19.0",
}
#: What transformers before 5.19 want.
TOKENIZERS = "0.22.2"
TESTS = "tests/sglang/test_compat.py"


def pins(version: str) -> list[str]:
    """What the environment of a version has in place of the lines of requirements/sglang-cpu.txt."""
    transformers = TRANSFORMERS[version]
    older = (
        []
        if transformers == TRANSFORMERS["0.5.23"]
        else [f"transformers=={transformers}", f"tokenizers=={TOKENIZERS}"]
    )
    return [f"sglang=={version}", *older]


def run(version: str) -> str:
    """Run the tests with a version; what pytest says last."""
    # Before 0.5.22 SGLang has no way without Triton to give out pages of KV; its interpreter needs no GPU.
    environ = os.environ | {"PYTHONPATH": str(CHECKOUT), "TRITON_INTERPRET": "1"}
    command = [str(environment("sglang", pins(version))), "-m", "pytest", "-q", TESTS]
    done = subprocess.run(command, cwd=CHECKOUT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        say(done.stdout)
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    for version in sys.argv[1:] or TRANSFORMERS:
        print(f"| SGLang, on a CPU | {version} | {run(version)} |", flush=True)


if __name__ == "__main__":
    main()
