import lzma,glob,json,os
n=0
for f in glob.glob('traces_before/*.xz'):
    name=os.path.basename(f)
    if name.startswith('modernbert'): continue
    t=lzma.open(f,'rt').read().split('\n'); old=dict(zip(t[::2],t[1::2]))
    g='./memlab/data/traces/'+name
    t=lzma.open(g,'rt').read().split('\n') if os.path.exists(g) else []; new=dict(zip(t[::2],t[1::2]))
    for k,l in old.items():
        if k in new or l=='null': continue
        w=json.loads(k)
        if 'checkpointing' not in w or not w.get('lora'): continue
        ops={x[5] for x in json.loads(l)['kinds'] if x[0]=='Alloc'}
        if ops & {'aten.native_dropout','aten._scaled_dot_product_efficient_attention_backward'}: continue
        new[k]=l; n+=1
    text='\n'.join(x for kv in sorted(new.items()) for x in kv)
    open(g,'wb').write(lzma.compress(text.encode(),preset=6))
print('restored',n)
