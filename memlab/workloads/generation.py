"""Text written token after token: a prompt is read (prefill), then one is written after the other.

One greedy loop in plain PyTorch runs on a simulated card and on the device that is here.
"""

import inspect
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memlab import models
from memlab.footprint import Phase
from memlab.spec.recipe import QUANTIZED
from memlab.spec.serving import Serving, cached_shapes
from memlab.trace.tracer import Tracer
from memlab.workloads import quantized
from memlab.workloads.training import check_tokens

KV_CACHE, LOGITS = "kv_cache", "logits"
MOST_STEPS = 4  # decode steps that are all run; of more the first and the last two


class Generation:
    """A model and its prompts, ready to `run()`: greedy, with a cache, without gradients.

    device: where everything lives. built_in: the device on which the model is made; a quantized
    base is made on the host.

    Attributes: model, recipe (the `Serving`), text (the tokens so far, int64, of shape
    [batch_size, tokens]; of an encoder-decoder model those of the decoder), skipped (decode steps
    that were jumped over).
    """

    def __init__(
        self,
        serving: Serving,
        device: torch.device | str = "cpu",
        built_in: torch.device | str = "cpu",
        seed: int = 0,
    ):
        self.recipe, self.skipped = serving, 0
        config = models.config(serving.model)
        dtype = quantized.COMPUTE_DTYPES[serving.compute_dtype]
        with torch.device(built_in):
            self.model = models.build(config, serving.task, dtype, serving.attention, seed)
        self.model.eval()
        if serving.base in QUANTIZED:
            quantized.quantize_base(self.model, serving)
            quantized.load(self.model, device)
        else:
            self.model.to(device)  # type: ignore[arg-type]  # transformers wraps it
        check_tokens(serving.batch_size, serving.prompt + serving.new_tokens)
        generator = torch.Generator().manual_seed(seed)
        shape = serving.batch_size, serving.prompt
        prompt = torch.randint(0, config.vocab_size, shape, generator=generator).to(device)
        self.encoded = prompt if serving.task == "seq2seq-lm" else None
        self.text = prompt
        if self.encoded is not None:
            first = config.decoder_start_token_id or 0
            self.text = torch.full((serving.batch_size, 1), first).to(device)

    @torch.no_grad()
    def run(self, tracer: Tracer, all_steps: bool = False) -> None:
        """Write the new tokens; the tracer is told the phase, and which tensors are what.

        all_steps: whether every decode step runs; otherwise, of many, the first and the last two.
        """
        cache, more = self._empty_cache(), {}
        tracer.stage = Phase.PREFILL
        if self.encoded is not None:
            more["encoder_outputs"] = self.model.get_encoder()(input_ids=self.encoded)
        self._step(tracer, cache, self.text, more)
        steps = self.recipe.new_tokens - 1
        for done in range(steps):
            if not all_steps and done in range(1, 1 + skipped_steps(steps)):
                if done == 1:
                    self.skipped = skipped_steps(steps)
                    tracer.stage = Phase.UNKNOWN
                    self._skip(tracer, cache)
                continue
            tracer.stage = Phase.DECODE
            self._step(tracer, cache, self.text if cache is None else self.text[:, -1:], more)
        tracer.stage = None

    def _step(self, tracer: Tracer, cache: Any, tokens: torch.Tensor, more: dict) -> None:
        """One forward pass, and the token that it says."""
        name = "input_ids" if self.encoded is None else "decoder_input_ids"
        more = {name: tokens, "use_cache": cache is not None} | more
        # Since 5.24 the models of transformers call it `cache`, and warn of its older name.
        named = inspect.signature(self.model.forward).parameters
        more["cache" if "cache" in named else "past_key_values"] = cache
        if self.encoded is None and not self.recipe.all_logits:
            more["logits_to_keep"] = 1  # as generate() asks
        logits = self.model(**more).logits
        tracer.name(logits, LOGITS)
        for tensor in cache_tensors(cache):
            tracer.name(tensor, KV_CACHE)
        self.text = torch.cat([self.text, logits[:, -1:].argmax(-1)], 1)

    def _skip(self, tracer: Tracer, cache: Any) -> None:
        """The cache and the text as they are after the skipped steps."""
        config, batch = self.model.config, self.recipe.batch_size
        zeros = torch.zeros((), dtype=torch.int64, device=self.text.device)
        self.text = torch.cat([self.text, zeros.expand(batch, self.skipped)], 1)
        if cache is None:
            return
        shapes = cached_shapes(config)
        zero = torch.zeros((), dtype=self.model.dtype, device=self.text.device)
        for layer in getattr(cache, "self_attention_cache", cache).layers:
            if not hasattr(layer, "update"):
                continue  # linear attention: its state does not grow with the text
            window = getattr(layer, "sliding_window", None)
            tokens = min(self.skipped, window or self.skipped)
            layer.update(*(zero.expand(batch, heads, tokens, size) for heads, size in shapes))
            if window:  # without the storage of what slid out
                layer.cumulative_length += self.skipped - tokens
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        for tensor in cache_tensors(cache):
            tracer.name(tensor, KV_CACHE)

    def _empty_cache(self) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache

        config = self.model.config
        kinds = {
            "dynamic": lambda: DynamicCache(config=config),
            "static": lambda: StaticCache(config, self.text.shape[1] + self.recipe.new_tokens),
            "fp8": lambda: QuantizedCache("fp8", config),
        }
        if self.recipe.cache == "none":
            return None
        cache = kinds[self.recipe.cache]()
        if self.encoded is None:
            return cache
        return EncoderDecoderCache(cache, DynamicCache(config=config))


def skipped_steps(steps: int) -> int:
    """How many of so many decode steps a simulation jumps over."""
    return steps - 3 if steps > MOST_STEPS else 0


def cache_tensors(cache: Any) -> list[torch.Tensor]:
    """The tensors that a cache of transformers holds."""
    if cache is None:
        return []
    parts = [getattr(cache, f"{name}_attention_cache", None) for name in ("self", "cross")]
    layers = [layer for part in parts if part for layer in part.layers] or cache.layers
    leaves = tree_leaves([vars(layer) for layer in layers])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
