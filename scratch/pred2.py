import sys, json, runpy
K=runpy.run_path('./tools/keep_predictions.py', run_name='k')
from memlab.evidence.records import card_files, load
name=sys.argv[1]; runs=load(card_files()[name])
if len(sys.argv)>2: runs=runs[::-1][:int(sys.argv[2])]
out={}
for i,r in enumerate(runs):
    out[r.name]=K['said_of'](r); json.dump(out,open('/tmp/pred_'+name,'w'))
    print(i,len(runs),flush=True)
print('done')
