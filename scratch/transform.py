import sys, json, lzma, glob, os, dataclasses
from collections import Counter
sys.path.insert(0,'./tools')
import record_traces as rt
from memlab import models
from memlab.predict.store import kept_of, text_of, Kept
from memlab.trace.events import Alloc, Free
from memlab.trace.log import Log, named, renumbered
from memlab.trace.layered import LayeredLog
from memlab.trace.moments import largest_moments
from memlab.trace.trace import Half
from memlab.footprint import Category, Phase
EFF='aten._scaled_dot_product_efficient_attention_backward'
def is_birth(e, op): return type(e[1]) is Alloc and e[1].operation == op
def changed(events, size):
    out, i = [], 0
    while i < len(events):
        e = events[i]
        nxt = events[i+1] if i+1 < len(events) else (None, None)
        if is_birth(e,'aten.native_dropout') and is_birth(nxt,'aten.native_dropout') and e[1].item != 1 and nxt[1].item == 1:
            out += [nxt, e]; i += 2; continue
        if is_birth(e, EFF):
            j = i
            while j < len(events) and is_birth(events[j], EFF): j += 1
            out += events[i:j]
            numel = e[1].nbytes // e[1].item
            assert e[1].item == 2 and 4*numel % size == 0
            births = [Alloc(n, Category.TEMPORARY, e[1].phase, e[1].module, EFF) for n in (4*numel//size, 4*numel)]
            names = [("scratch", i, k) for k in (0,1)]
            out += list(zip(names, births))
            out += [(n, Free(b, e[1].phase, 0)) for n, b in zip(names, births)]
            i = j; continue
        out.append(e); i += 1
    # deaths in a row in the order of births
    place, res, run = {}, [], []
    def flush():
        res.extend(sorted(run, key=lambda x: place[x[0]])); run.clear()
    for e in out:
        if type(e[1]) is Free:
            if run and run[-1][1].phase != e[1].phase: flush()
            run.append(e)
        else:
            flush()
            if type(e[1]) is Alloc: place[e[0]] = len(res)
            res.append(e)
    flush()
    return renumbered(res)
def transform(kept, size):
    log = kept.half.log
    depths = [log.patterns] if log.blocks is None else [log.patterns-1, log.patterns, log.patterns+1]
    logs = [Log(changed(list(named([log.kinds[i] for i in log.order_at(p).tolist()])), size), Counter()) for p in depths]
    new = LayeredLog.of(logs, log.patterns)
    if new is None: return None
    new = dataclasses.replace(new, weights=log.weights, work=log.work, assumptions=log.assumptions)
    half = Half(new, kept.half.symbols and kept.half.symbols.sizes, kept.half.batches, kept.half.workspace)
    return Kept(half, kept.layers, largest_moments(half))
def read(f):
    t=lzma.open(f,'rt').read().split('\n') if os.path.exists(f) else []
    return dict(zip(t[::2],t[1::2]))
NEW='./memlab/data/traces/'
if __name__ == '__main__':
    mode=sys.argv[1]; same=diff=made=0
    for f in sorted(glob.glob('traces_before/*.xz')):
        name=os.path.basename(f)
        if name.startswith('modernbert'): continue
        old,new=read(f),read(NEW+name)
        todo={}
        for k,l in old.items():
            w=json.loads(k)
            if l=='null' or 'checkpointing' not in w or not w.get('lora'): continue
            if mode=='check' and k not in new or mode!='check' and k in new: continue
            v=json.loads(l); ops={x[5] for x in v['kinds'] if x[0]=='Alloc'}
            if not ops & {'aten.native_dropout',EFF}: continue
            base=w.get('base')
            if isinstance(base,list) and base[0]=='nf4' and w['precision'].endswith('-amp'): continue
            size=(v['sizes'] or {}).get('d')
            if EFF in ops and size is None: print('no d', name, k[:100]); continue
            t=transform(kept_of(l), size or 1)
            if t is None: print('none',name,k[:80]); continue
            text=text_of(t)
            if mode=='check':
                a,b=rt._values(text),rt._values(new[k])
                if a==b: same+=1
                else: diff+=1; print('DIFF',name,k[:200],[n for n in a if a[n]!=b.get(n)])
            else: todo[k]=text; made+=1
        if todo and mode=='write':
            new=read(NEW+name)|todo
            text='\n'.join(x for kv in sorted(new.items()) for x in kv)
            open(NEW+'tmp','wb').write(lzma.compress(text.encode(),preset=6)); os.replace(NEW+'tmp',NEW+name)
    print(mode,same,diff,made)
