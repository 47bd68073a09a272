from collections.abc import Collection
from typing import final

from lfmfast._model import Model

@final
class GrammarVocabulary:
    def __new__(cls, model: Model, markers: Collection[str] = ...) -> GrammarVocabulary: ...

@final
class Grammar:
    def __new__(cls, vocabulary: GrammarVocabulary, kind: str, text: str) -> Grammar: ...
