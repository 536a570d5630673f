import sys; sys.argv=['x']; exec(open('/tmp/transform.py').read().split("if __name__")[0])
n=0
for f in sorted(glob.glob('traces_before/*.xz')):
    name=os.path.basename(f); old,new=read(f),read(NEW+name); b=len(new)
    for k in list(new):
        w=json.loads(k); base=w.get('base')
        if new[k]==old.get(k) and isinstance(base,list) and base[0]=='nf4' and w['precision'].endswith('-amp') and 'checkpointing' in w:
            del new[k]; n+=1
    text='\n'.join(x for kv in sorted(new.items()) for x in kv)
    open(NEW+'tmp','wb').write(lzma.compress(text.encode(),preset=6)); os.replace(NEW+'tmp',NEW+name)
print('dropped',n)
