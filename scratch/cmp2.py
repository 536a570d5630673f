"""As cmp_hist, by operator names; sizes may have a rest up to 1 MiB."""
import gzip, json, sys, difflib, collections
from memlab.evidence.grid import recipe_of
from memlab.gpus import find_gpu
from memlab.predict.traces import run_log
from memlab.trace.events import Alloc, Free, Marker
gpu = find_gpu("H100")
SKIP = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::resize_", "aten::new_empty", "aten::zeros", "aten::zeros_like","aten::new_zeros","aten::contiguous"}
def rounded(n): return max(512, -(-n // 512) * 512)
def word(path):
    parts = path.split(" < ")
    for p in parts:
        if p not in SKIP: return p.replace("::", ".")
    return parts[0].replace("::", ".")
for f in sys.argv[1:]:
    d = json.load(gzip.open(f)); r = recipe_of(d["name"])
    real = [(b, word(d["ops"][o]), d["ops"][o]) for b, o, a in d["rows"] if b > 0]
    evs = list(run_log(r, gpu).events())
    last = max(i for i, (_, s) in enumerate(evs) if s is Marker.RESET)
    s = [(rounded(e.nbytes), e.operation, e.module[-30:]) for _, e in evs[last:] if type(e) is Alloc and e.nbytes > 0]
    print("=====", d["name"], len(real), len(s))
    # pair by (op, size class): sizes equal or rest
    sizes = {x[0] for x in s}
    def norm(b, op):
        if b in sizes: return b
        c = [z for z in sizes if 0 < b - z <= 2**20]
        return max(c) if c else b
    a = [(norm(x[0], x[1])) for x in real]; b = [x[0] for x in s]
    found, first = collections.Counter(), {}
    for tag, i, j, k, l in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal": continue
        t = "REAL " + " | ".join(f"{x[0]:,} {x[1]}" for x in real[i:j][:7]) + "   SIM " + " | ".join(f"{x[0]:,} {x[1]} {x[2]}" for x in s[k:l][:7])
        found[t] += 1; first.setdefault(t, (i, k))
    for t, n in found.most_common(22): print(n, "x", first[t], t[:330])
