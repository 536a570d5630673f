import lzma,glob,json,collections,os
c=collections.Counter(); heads=collections.Counter()
for f in glob.glob('traces_before/*.xz'):
    t=lzma.open(f,'rt').read().split('\n'); old=dict(zip(t[::2],t[1::2]))
    g='./memlab/data/traces/'+os.path.basename(f)
    t=lzma.open(g,'rt').read().split('\n') if os.path.exists(g) else []; new=set(t[::2])
    for k,l in old.items():
        if k in new: continue
        w=json.loads(k); kind='passes' if 'checkpointing' in w else 'updates'
        what='lora' if w.get('lora') else 'frozen' if w.get('freeze') else 'full'
        c[kind,what,(w.get('optimizer') if kind=='updates' else '')]+=1; heads[os.path.basename(f)[:12],kind,what]+=1
print(sum(c.values())); 
for k,n in c.most_common(): print(n,k)
for k,n in sorted(heads.items()): print(n,k)
