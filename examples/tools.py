"""A model that calls Python functions, and answers with what they gave.

    pip install 'lfmfast[hub]'
    python tools.py "What is the weather in Paris and Rome?"
    MODEL=LiquidAI/LFM2.5-1.2B-Instruct-GGUF python tools.py "What is 3 plus 4?"   # MODEL: a file, or a name on the Hub
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from lfmfast import Model, ToolCall


def get_weather(city: str) -> dict[str, Any]:
    """Get the weather in a city."""
    temperatures = {"Paris": 21, "Rome": 28}  # a real one would ask a weather service
    if city not in temperatures:
        raise LookupError(f"no weather station in {city}")  # the model is told
    return {"temperature": temperatures[city], "sky": "sunny"}


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def show(call: ToolCall) -> None:
    print(f"  {call.name}({', '.join(f'{name}={value!r}' for name, value in call.parsed.items())})")


def main() -> None:
    name = os.environ.get("MODEL", "demo")
    question = " ".join(sys.argv[1:]) or "What is the weather in Paris?"
    with Model(name) if Path(name).exists() else Model.from_pretrained(name) as model:
        answer = model.chat().run_tools(question, [get_weather, add], on_call=show, max_tokens=200)
    print(answer.text)


if __name__ == "__main__":
    main()
