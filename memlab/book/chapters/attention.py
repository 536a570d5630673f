"""Attention in tiles: its large memory with a log, its backward pass, and what both ways move."""

from collections.abc import Callable

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from memlab.book import drawing, show
from memlab.units import MiB

WORK = {  # operations for each output element; one where not named
    "bmm": lambda args: 2 * args[0].size(-1),
    "_softmax": lambda args: 5,
    "_softmax_backward_data": lambda args: 4,
}
Attend = Callable[..., torch.Tensor]
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def rows_of_scores() -> dict[str, torch.Tensor]:
    """Rows that a softmax must survive, always the same."""
    drawn = torch.Generator().manual_seed(0)
    usual, hidden = torch.randn(1000, generator=drawn), torch.full((500,), -torch.inf)
    return {
        "usual": usual,
        "all near 10,000": usual + 1e4,
        "rising to 10,000": torch.linspace(-1e4, 1e4, 1000),
        "falling from 10,000": torch.linspace(1e4, -1e4, 1000),
        "a giant at the end": torch.cat([usual, torch.tensor([1e4])]),
        "second half hidden": torch.cat([usual[:500], hidden]),
        "first half hidden": torch.cat([hidden, usual[500:]]),
    }


def distances(row: torch.Tensor, find: Callable) -> tuple[float, float]:
    """Largest errors against a softmax in fp64: of the plain quotient, and with `find`.

    find: of (row, length of a part), gives the maximum and the sum.
    """
    exact = row.double().softmax(0)
    m, total = find(row, 64)
    naive = row.exp() / row.exp().sum()
    ways = naive, (row - m).exp() / total
    return tuple(float((way - exact).abs().max()) for way in ways)


def draw_scores(length: int, config: PretrainedConfig) -> Figure:
    """The scores that eager attention keeps, and the tile that a fused kernel holds, of one layer.

    length: tokens. config: of a decoder. MiB are in 16 bits, and with the fp32 number a row that a
    fused kernel leaves beside its output.
    """
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    blue, kept, chip = (show.COLOURS[n] for n in ("parameters", "activations", "temporary"))
    fig, ax = drawing.sheet(2.95)
    low, side, strip, gap, count = 0.52, 1.68, 0.26, 0.06, 4
    tile = side / count
    held = {"eager": f"more than {heads * length**2 * 2 / MiB:,.0f} MiB"}
    held["fused (sdpa)"] = f"{heads * length * (size * 2 + 4) / MiB:,.0f} MiB"
    for left, (name, most) in zip((0.05, 2.63), held.items(), strict=True):
        x, above = left + strip + gap, low + side + gap
        drawing.say(ax, x + side / 2, 2.8, name, ha="center", weight="bold")
        drawing.say(ax, x + side / 2, 0.36, "each layer keeps", ha="center", fontsize=drawing.SMALL)
        drawing.say(ax, x + side / 2, 0.13, most, ha="center", weight="bold")
        if name == "eager":
            drawing.block(ax, (left, low), (strip, side), blue, "Q")
            drawing.block(ax, (x, above), (side, strip), blue, "K, V")
            words = f"{length:,} x {length:,}\nscores,\nof {heads} heads"
            drawing.block(ax, (x, low), (side, side), kept, words)
            drawing.block(ax, (x + side + gap, low), (strip, side), kept, "O")
            continue
        short = tile - 0.04
        for i in range(count):  # from below and from the left
            y, here = low + i * tile + 0.02, x + i * tile + 0.02
            labels = ("Q", "O") if i == 2 else ("", "")
            drawing.block(ax, (left, y), (strip, short), chip if i == 2 else blue, labels[0])
            done = ("", "", chip, kept)[i]
            drawing.block(ax, (x + side + gap, y), (strip, short), done, labels[1])
            label = "K, V" if i == 1 else ""
            drawing.block(ax, (here, above), (short, strip), chip if i == 1 else blue, label)
            for j in range(count):
                drawing.block(ax, (x + j * tile, low + i * tile), (tile, tile))
        y = low + 2 * tile
        drawing.block(ax, (x + tile, y), (tile, tile), chip, "tile")
        ends = (x + side - 0.05, y + tile / 2), (x + 2 * tile + 0.05, y + tile / 2)
        look = {"arrowstyle": "->", "color": show.GREY, "lw": 1.5}
        ax.annotate("", *ends, arrowprops=look)
    return fig


class Traffic(TorchDispatchMode):
    """A row a kernel: its name, bytes read and written, operations."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or name in ("_unsafe_view", "detach")):
            work = WORK.get(name, lambda args: 1)(args) * out.numel()
            tensors = [x for x in tree_leaves(args) if hasattr(x, "nbytes")]
            self.rows.append([name, sum(x.nbytes for x in tensors), out.nbytes, work])
        return out


def traffic_of(
    attend: Attend, n: int, d: int = 64, backward: bool = False, causal: bool = False
) -> pd.DataFrame:
    """What the kernels of one head in bf16 read and write, in bytes, and compute."""
    shape = dict(size=(1, 1, n, d), dtype=torch.bfloat16, device="meta")
    q, k, v = (torch.empty(**shape, requires_grad=True) for _ in range(3))
    with Traffic() as forward:
        out = attend(q, k, v, causal)
    with Traffic() as back:
        out.backward(torch.empty(**shape))
    columns = ["kernel", "read", "written", "operations"]
    return pd.DataFrame((back if backward else forward).rows, columns=columns)


class HBM:
    """The large memory: each tile that is loaded or stored is logged with its bytes."""

    def __init__(self):
        self.log = []

    def load(self, name, tensor, rows):
        tile = tensor[..., rows, :]
        self.log.append(("read", name, rows.start, tile.nbytes))
        return tile.float()

    def store(self, name, tensor, rows, tile):
        tensor[..., rows, :] = tile
        self.log.append(("written", name, rows.start, tensor[..., rows, :].nbytes))


def tiles(length: int, size: int) -> list[slice]:
    """Slices of so many rows; the last may be shorter."""
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def tile_scores(q, k, rows: slice, columns: slice, causal: bool) -> torch.Tensor:
    """Scores of a tile of queries and one of keys; a causal mask follows from where they are."""
    s = q @ k.mT * q.size(-1) ** -0.5
    if causal:
        i = torch.arange(rows.start, rows.stop, device=s.device)
        j = torch.arange(columns.start, columns.stop, device=s.device)
        s = s.masked_fill(j > i[:, None], -torch.inf)
    return s


def row_sums(out, dout, tile: int, hbm: HBM) -> torch.Tensor:
    """D: each row of dO times its row of O, summed."""
    sums = out.new_empty(*out.shape[:-1], 1, dtype=torch.float32)
    for rows in tiles(out.size(-2), tile):
        both = hbm.load("O", out, rows) * hbm.load("dO", dout, rows)
        hbm.store("D", sums, rows, both.sum(-1, keepdim=True))
    return sums


def flash_backward(q, k, v, out, lse, dout, causal: bool, tile: int, hbm: HBM | None = None):
    """Gradients of queries, keys and values, with the tiles of P computed again from `lse`."""
    hbm, scale = hbm or HBM(), q.size(-1) ** -0.5
    sums = row_sums(out, dout, tile, hbm)
    dq = torch.zeros_like(q, dtype=torch.float32)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for columns in tiles(k.size(-2), tile):
        k_tile, v_tile = hbm.load("K", k, columns), hbm.load("V", v, columns)
        dk_tile = dv_tile = 0.0
        for rows in tiles(q.size(-2), tile):
            if causal and columns.start >= rows.stop:
                continue
            q_tile, do_tile = hbm.load("Q", q, rows), hbm.load("dO", dout, rows)
            s = tile_scores(q_tile, k_tile, rows, columns, causal)
            p = (s - hbm.load("L", lse, rows)).exp()
            ds = p * (do_tile @ v_tile.mT - hbm.load("D", sums, rows)) * scale
            dv_tile = dv_tile + p.mT @ do_tile
            dk_tile = dk_tile + ds.mT @ q_tile
            hbm.store("dQ", dq, rows, hbm.load("dQ", dq, rows) + ds @ k_tile)
        hbm.store("dK", dk, columns, dk_tile)
        hbm.store("dV", dv, columns, dv_tile)
    return dq.to(q.dtype), dk, dv


def function_of(flash_forward: Forward) -> type[torch.autograd.Function]:
    """A forward pass in tiles and `flash_backward` as one operation of (q, k, v, causal, tile)."""

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, causal=False, tile=64):
            fit = q.shape[-1] == k.shape[-1] and k.shape[:-1] == v.shape[:-1]
            if not fit or 0 in (*q.shape, *k.shape) or tile < 1:
                shapes = [list(x.shape) for x in (q, k, v)]
                raise ValueError(
                    f"query, key and value are {shapes}, tile is {tile}: allowed are equal head "
                    "sizes of query and key, a value for each key, and lengths and tiles from 1"
                )
            out, lse = flash_forward(q, k, v, causal, tile)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.how = causal, tile
            return out

        @staticmethod
        def backward(ctx, dout):
            return *flash_backward(*ctx.saved_tensors, dout, *ctx.how), None, None

    return Flash


def farthest(standard: Attend, attend: Attend, tensors, dout, causal: bool) -> tuple[float, float]:
    """Largest errors against the standard in fp64: of the output, of the gradients."""
    results = []
    for function, dtype in ((standard, torch.float64), (attend, dout.dtype)):
        qkv = [x.detach().to(dtype).requires_grad_() for x in tensors]
        out = function(*qkv, causal)
        out.backward(dout.to(dtype))
        results.append([out.detach(), *(x.grad for x in qkv)])
    off = [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
    return off[0], max(off[1:])


def exactness(standard: Attend, flash: Attend, device: torch.device) -> dict[str, list[float]]:
    """`farthest` of the standard and of tiles, in fp32 and then in bf16, four cases each."""
    exact = {}
    for dtype in (torch.float32, torch.bfloat16):
        for n in (256, 333):
            for causal in (False, True):
                torch.manual_seed(0)
                *made, dout = (torch.randn(1, 2, n, 64).to(device, dtype) for _ in range(4))
                name = f"{str(dtype)[6:]}, N = {n}{', causal' * causal}"
                off = (farthest(standard, way, made, dout, causal) for way in (standard, flash))
                exact[name] = [error for pair in off for error in pair]
    return exact


def logged(flash_forward: Forward, n: int, causal: bool, tile: int = 128) -> list[HBM]:
    """The memories of a forward and a backward pass of one head in bf16."""
    x = torch.zeros(1, 1, n, 64, dtype=torch.bfloat16)
    forward, back = HBM(), HBM()
    out, lse = flash_forward(x, x, x, causal, tile, forward)
    flash_backward(x, x, x, out, lse, x, causal, tile, back)
    return [forward, back]


def moved_by_tiles(flash_forward: Forward, n: int, tile: int = 128) -> list[int]:
    """Bytes to and from the large memory, forward and backward."""
    return [sum(row[-1] for row in hbm.log) for hbm in logged(flash_forward, n, False, tile)]


def moved_by_standard(standard: Attend, n: int, causal: bool = False) -> list[int]:
    """The same of the kernels of standard attention."""
    ways = [traffic_of(standard, n, 64, back, causal) for back in (False, True)]
    return [int((t["read"] + t["written"]).sum()) for t in ways]


def bill(standard: Attend, flash_forward: Forward) -> dict[int, list[int]]:
    """Length -> bytes moved by the standard forward and backward, then by tiles of 128."""
    ways = (moved_by_standard(standard, n) + moved_by_tiles(flash_forward, n) for n in (1024, 2048))
    return dict(zip((1024, 2048), ways, strict=True))


def moments(log: list[tuple], outer: str, inner: str, tile: int) -> list[list[int]]:
    """[row, column, bytes moved so far] of each tile of scores."""
    film, at, moved = [], {}, 0
    for way, name, start, nbytes in log:
        if way == "read" and name in (outer, inner):
            at[name] = start // tile
            if name == inner:
                film.append([at.get("Q", 0), at.get("K", 0), 0])
        moved += nbytes
        if film:
            film[-1][2] = moved
    return film


def films(flash_forward: Forward, causal: bool, tile: int = 128) -> list[list[list[int]]]:
    """`moments` of the forward and the backward pass over six tiles of one head."""
    forward, back = logged(flash_forward, 6 * tile, causal, tile)
    return [moments(forward.log, "Q", "K", tile), moments(back.log, "K", "Q", tile)]


def player_data(standard: Attend, flash_forward: Forward) -> tuple[dict, dict]:
    """What a `TilePlayer` shows: pass -> its film, and pass -> bytes that the standard moves."""
    names = ["forward", "backward", "forward, causal", "backward, causal"]
    shown = films(flash_forward, False) + films(flash_forward, True)
    whole = moved_by_standard(standard, 768) + moved_by_standard(standard, 768, True)
    return dict(zip(names, shown, strict=True)), dict(zip(names, whole, strict=True))


def learned(flash: Attend, device: torch.device, seed: int, steps: int = 12) -> dict[str, list]:
    """Losses of a small GPT-2 with eager, sdpa and `flash`, which transformers takes by a name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from memlab import models
    from memlab.book.lessons import shuffled_blocks, small_config, train_on

    AttentionInterface.register("from_scratch", by_name(flash))
    AttentionMaskInterface.register("from_scratch", sdpa_mask)
    tokenizer, ids = shuffled_blocks(length=64)
    config, losses = small_config("gpt2-tiny", vocab_size=len(tokenizer), n_embd=64), {}
    for kind in ("eager", "sdpa", "from_scratch"):
        model = models.build(config, attention=kind, seed=seed).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
        losses[kind] = train_on(model, optimizer, ids.to(device)[: 8 * steps].split(8))
    return losses


def apart_and_fallen(losses: dict[str, list]) -> tuple[float, float]:
    """The largest distance of two curves at any step, and by how much the first one falls."""
    by_step = list(zip(*losses.values(), strict=True))
    first = next(iter(losses.values()))
    return max(max(step) - min(step) for step in by_step), first[0] - first[-1]


def by_name(flash: Attend) -> Callable:
    """A causal attention as transformers calls it; it refuses what `flash` cannot do."""

    def from_scratch(module, q, k, v, mask, scaling=None, dropout=0.0, **more):
        if mask is not None or dropout or scaling not in (None, q.size(-1) ** -0.5):
            raise ValueError("from_scratch: no mask, dropout, other scale")
        return flash(q, k, v, True, 32).transpose(1, 2).contiguous(), None

    return from_scratch
