"""keep_predictions over two processes."""
import sys, runpy
from concurrent.futures import ProcessPoolExecutor
K=runpy.run_path('./tools/keep_predictions.py', run_name='k')
from memlab.evidence.loops import PREDICTIONS, kept_predictions
from memlab.evidence.records import card_files, load
from memlab.predict.measure import versions
from datetime import date
def one(job):
    name, run = job
    return name, run.name, K['said_of'](run)
if __name__=='__main__':
    files=sys.argv[1:]
    kept=kept_predictions(); found=kept.pop('runs'); about={"date": date.today().isoformat(),"versions": versions()}
    jobs=[(n,r) for n,p in card_files().items() if not files or n in files for r in load(p)]
    print(len(jobs))
    with ProcessPoolExecutor(int(__import__("os").environ.get("WORKERS","2"))) as pool:
        res=list(pool.map(one,jobs,chunksize=2))
    for n,rn,said in res:
        f=found.setdefault(n,{}); f[rn]=K['_joined'](f.get(rn,{}),said,False)
    # the order of the file
    for n,p in card_files().items():
        found[n]={r.name: found[n][r.name] for r in load(p)}
    K['write'](about,found)
