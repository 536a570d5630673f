import lzma,glob
n=0;nul=0
for f in glob.glob('./memlab/data/traces/*.xz'):
    t=lzma.open(f,'rt').read().split('\n')[1::2]; n+=len(t); nul+=sum(x=='null' for x in t)
print(n,'of 4292; null',nul)
