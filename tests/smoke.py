"""A package as its users first meet it: `python tests/smoke.py` imports it, looks at it, and has it answer.

For an environment with nothing in it but the package and what that depends on; pytest is not needed.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import lfmfast

MODEL = Path(__file__).resolve().parent / "data" / "lfm2-tiny" / "lfm2-tiny-f16.gguf"


def main() -> None:
    print(json.dumps(lfmfast.build_info(), indent=2))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with lfmfast.Model(MODEL, n_ctx=1024, n_gpu_layers=0) as model:
        said = model.generate(question, temperature=0, max_tokens=40).text
        assert "Paris" in said, said
        form = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
                "additionalProperties": False}  # fmt: skip
        said = model.generate(question, temperature=0, max_tokens=40, json_schema=form).text
        assert json.loads(said)["city"] in ("Paris", "Rome"), said
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert not getattr(sys, "_is_gil_enabled")(), "something switched the GIL on"  # noqa: B009
    print("works")


if __name__ == "__main__":
    main()
