"""Memory events of the second step of grid runs, by operator: python history.py OUT NAME"""
import bisect, gzip, json, os, sys, tempfile
import torch
from memlab.evidence.grid import recipe_of
from memlab.predict.measure import allocator_of, pick_device
from memlab.spec.recipe import QUANTIZED
from memlab.workloads.training import Training, import_libraries

out, name = sys.argv[1:3]
device = pick_device()
recipe = recipe_of(name)
if device.type == "cpu":
    recipe = recipe.twin(seq_len=64)
import_libraries(recipe)
with allocator_of(recipe, device):
    training = Training(recipe, device, 0, None if recipe.base in QUANTIZED else device)
    training.step()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    training.step()
    if cuda:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        training.step()
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "t.json")
    prof.export_chrome_trace(path)
    events = json.load(open(path))["traceEvents"]
wanted = 1 if cuda else 0
ops, memory = {}, []
for e in events:
    if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation"):
        ops.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"], e["name"]))
    elif e.get("name") == "[memory]" and e["args"]["Device Type"] == wanted:
        memory.append((e["ts"], e["tid"], e["args"]["Bytes"], e["args"]["Addr"]))
for tid in ops:
    ops[tid].sort(key=lambda o: (o[0], -o[1]))
starts = {tid: [o[0] for o in found] for tid, found in ops.items()}
names, rows = {}, []
for ts, tid, nbytes, addr in sorted(memory):
    found, path = ops.get(tid, []), []
    i = bisect.bisect_right(starts.get(tid, []), ts) - 1
    steps = 0
    while i >= 0 and steps < 400 and len(path) < 3:
        if found[i][1] >= ts:
            path.append(found[i][2])
        i, steps = i - 1, steps + 1
    text = " < ".join(path)
    rows.append([nbytes, names.setdefault(text, len(names)), addr % 2**40])
result = {"name": name, "ops": list(names), "rows": rows}
if cuda:
    result |= {"start": start, "peak": peak}
with gzip.open(out, "wt") as file:
    json.dump(result, file, separators=(",", ":"))
print(name, len(rows), len(names), result.get("peak"), flush=True)
