"""Greedy text generation: one prefill pass over the prompt, then one decode step per token.

The loop is plain PyTorch on a transformers model and a transformers cache. The same code runs on
the simulated GPU and on a real device. A simulation does not run every decode step: of more than
four steps it runs the first and the last two, and fills the cache in between (`Generation._skip`).
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
MOST_STEPS = 4  # up to this many decode steps are all run; of more, the first and the last two


class Generation:
    """A model and its prompts, ready to `run()`: greedy, with a cache, without gradients.

    device: the device that holds the model, the prompts and the cache.
    built_in: the device on which the model is initialised; "cpu" for a quantized base.

    Attributes: model, recipe (the `Serving`), text (the tokens so far, int64, of shape
    [batch_size, tokens]; the decoder's tokens for an encoder-decoder model), skipped (the number
    of decode steps that were not run).
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
        # An encoder-decoder model encodes the prompt and starts to decode from a single token.
        self.encoded = prompt if serving.task == "seq2seq-lm" else None
        self.text = prompt
        if self.encoded is not None:
            first = config.decoder_start_token_id or 0
            self.text = torch.full((serving.batch_size, 1), first).to(device)

    @torch.no_grad()
    def run(self, tracer: Tracer, all_steps: bool = False) -> None:
        """Generate all new tokens, and tell the tracer the phase and what the tensors are.

        all_steps: whether every decode step runs. Otherwise, of more than `MOST_STEPS` decode
        steps, only the first and the last two run.
        """
        cache, more = self._empty_cache(), {}
        tracer.stage = Phase.PREFILL
        if self.encoded is not None:
            # The encoder runs once; each decoder step reads its output.
            more["encoder_outputs"] = self.model.get_encoder()(input_ids=self.encoded)
        self._step(tracer, cache, self.text, more)
        steps = self.recipe.new_tokens - 1  # the prefill has written the first token
        for done in range(steps):
            # Step 0 runs, then all skipped tokens enter the cache at once, then the last two run.
            # The first step meets what the prefill left behind, the last ones the largest cache.
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
        """Run one forward pass and append the most likely token to the text."""
        name = "input_ids" if self.encoded is None else "decoder_input_ids"
        more = {name: tokens, "use_cache": cache is not None} | more
        # transformers 5.24 renamed `past_key_values` to `cache` and warns about the old name.
        named = inspect.signature(self.model.forward).parameters
        more["cache" if "cache" in named else "past_key_values"] = cache
        if self.encoded is None and not self.recipe.all_logits:
            more["logits_to_keep"] = 1  # as transformers' generate() does: only the last logits
        logits = self.model(**more).logits
        tracer.name(logits, LOGITS)
        for tensor in cache_tensors(cache):
            tracer.name(tensor, KV_CACHE)
        self.text = torch.cat([self.text, logits[:, -1:].argmax(-1)], 1)

    def _skip(self, tracer: Tracer, cache: Any) -> None:
        """Extend the cache and the text to the state they would have after the skipped steps."""
        config, batch = self.model.config, self.recipe.batch_size
        zeros = torch.zeros((), dtype=torch.int64, device=self.text.device)
        self.text = torch.cat([self.text, zeros.expand(batch, self.skipped)], 1)
        if cache is None:
            return
        shapes = cached_shapes(config)
        # An expanded scalar takes no memory, so the only new storages are those of the cache.
        zero = torch.zeros((), dtype=self.model.dtype, device=self.text.device)
        for layer in getattr(cache, "self_attention_cache", cache).layers:
            if not hasattr(layer, "update"):
                continue  # linear attention: its state does not grow with the text
            window = getattr(layer, "sliding_window", None)
            tokens = min(self.skipped, window or self.skipped)
            layer.update(*(zero.expand(batch, heads, tokens, size) for heads, size in shapes))
            if window:
                # `DynamicSlidingWindowLayer.update` (transformers/cache_utils.py) counts the tokens
                # it is given and keeps a view of the concatenated keys. Count the tokens beyond
                # the window too, and copy the view to free the storage of the evicted tokens.
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
    """The number of decode steps that a simulation leaves out, of `steps` in total."""
    return steps - 3 if steps > MOST_STEPS else 0


def cache_tensors(cache: Any) -> list[torch.Tensor]:
    """All tensors that a transformers cache holds; an empty list for None."""
    if cache is None:
        return []
    # An EncoderDecoderCache has a self-attention and a cross-attention cache, others only `layers`.
    parts = [getattr(cache, f"{name}_attention_cache", None) for name in ("self", "cross")]
    layers = [layer for part in parts if part for layer in part.layers] or cache.layers
    leaves = tree_leaves([vars(layer) for layer in layers])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
