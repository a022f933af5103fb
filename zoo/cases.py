"""Case: a model class of transformers and the kind of head it has, as transformers' own tables list them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

KINDS: dict[str, tuple[str, ...]] = {
    "causal": ("CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "sequence to sequence": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "vision": (
        "IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION",
        "VIDEO_CLASSIFICATION",
    ),
    "audio": ("CTC", "AUDIO_CLASSIFICATION"),
    "multimodal": (
        "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "ZERO_SHOT_IMAGE_CLASSIFICATION", "VISUAL_QUESTION_ANSWERING",
    ),
    "time series": ("TIME_SERIES_PREDICTION", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION"),
}  # fmt: skip
"""By kind: the tables of transformers.models.auto.modeling_auto, MODEL_FOR_..._MAPPING_NAMES."""

PARTS = 24
"""Of the whole zoo, each a test of some 20 classes of every kind, so that processes of the tests share the work."""


LIMIT_S = 900.0
"""For a case in a test. None takes so long; with other work beside, the slowest have taken more than 240 s."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model class; `kind` and `table` are the first that list it."""

    name: str
    kind: str
    table: str
    model_type: str

    def model_class(self) -> Any:
        """Returns the class. Raises: whatever its import raises, where it needs a package that is not here."""
        import transformers

        return getattr(transformers, self.name)


def all_cases() -> list[Case]:
    """Returns every class of the kinds once, by kind and name."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Case] = {}
    for kind, tables in KINDS.items():
        for table in tables:
            for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").items():
                for name in (names,) if isinstance(names, str) else names:
                    found.setdefault(name, Case(name, kind, table, model_type))
    order = list(KINDS)
    return sorted(found.values(), key=lambda case: (order.index(case.kind), case.name))


def select(cases: Iterable[Case], only: Iterable[str], every: int = 1) -> list[Case]:
    """Returns the cases whose class, kind or model type matches one of the patterns; of those each `every`-th."""
    patterns = list(only)
    chosen = [
        case
        for case in cases
        if not patterns
        or any(fnmatchcase(word, one) for one in patterns for word in (case.name, case.kind, case.model_type))
    ]
    return chosen[::every]
