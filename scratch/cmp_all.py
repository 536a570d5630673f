import json, sys, time
from memlab.spec.recipe import Recipe
from memlab.predict.simulate import simulate
recs=json.load(open('./memlab/data/records/nvidia-h100-80gb-hbm3.json'))['records']
part=int(sys.argv[1])
for i,r in enumerate(recs):
    if i%2!=part: continue
    try:
        f=simulate(Recipe(**r['recipe']),"H100"); g=r['figures']
        a,b=f.peak_allocated/2**20,g['peak_allocated_bytes']/2**20; c,d=f.peak_reserved/2**20,g['peak_reserved_bytes']/2**20
        s=f.step_time.expected
        print(f"{r['name'][:75]:75} {a:11.2f} {b:11.2f} {100*(a/b-1):7.2f}%  {c:9.0f} {d:9.0f} {100*(c/d-1):7.2f}%  ctx {g['context_bytes']/2**20:.0f}  s {s:.3f} {g['step_seconds']:.3f} {s/g['step_seconds']:.2f}",flush=True)
    except Exception as e: print(r['name'],'ERR',str(e)[:150],flush=True)
