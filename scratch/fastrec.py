"""record_traces without the check of each half; those that were null before are checked."""
import sys, os, functools, glob, lzma
sys.path.insert(0,'./tools')
import record_traces as rt
rt.with_fixed_hashes()
from memlab.predict import traces as T
from memlab.predict.traces import *
full = T._recorded
nulls=set()
for f in glob.glob('traces_before/*.xz'):
    t=lzma.open(f,'rt').read().split('\n'); name=os.path.basename(f)
    nulls|={(name,k) for k,l in zip(t[::2],t[1::2]) if l=='null'}
from memlab.predict.shipped import divided, file_of
def quick(recipe, card, found):
    for key in keys_of(recipe, found, found):
        s, rest = divided(key)
        if (file_of(s), rest) in nulls: return full(recipe, card, found)
    around = Circumstances.of(recipe); import_libraries(recipe)
    primed, sizes = found.chosen(recipe, around)
    layers = layers_of(primed); halves = None
    if layers: halves = T._of_shallow(primed, layers, functools.partial(shallow_log, gpu=card))
    if not halves: return full(recipe, card, found)
    halves = [Half(one, sizes, around.batches, card.workspace) for one in halves]
    return tuple(Kept(half, layers, largest_moments(half)) for half in halves)
T._recorded = quick
if __name__ == '__main__': print(len(nulls)); rt.main()
