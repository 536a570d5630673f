import sys; sys.path.insert(0,'tools')
import record_traces as rt, random, itertools
from memlab.predict import traces as T
from memlab.predict.traces import *
from memlab.predict.traces import _to_check,_deep,_of_shallow,_in_words
from memlab.predict.structure import structures
def why(recipe, card):
    card=card.without_limit(); found=next(structures(recipe,card,roughly=True))[0]
    around = Circumstances.of(recipe); import_libraries(recipe)
    primed, sizes = found.chosen(recipe, around)
    like = with_like_states(recipe, found)
    layers, check = layers_of(primed), _to_check(like, around)
    print(recipe, card.name, sizes, layers)
    of_check = shallow_log(_deep(check, layers.number(CHECKED_PATTERNS)), gpu=card)
    run = functools.partial(shallow_log, gpu=card, most=MORE * len(of_check.steps))
    halves = _of_shallow(primed, layers, run)
    if not halves: print("shallow disagree"); return
    halves = [Half(one, sizes, around.batches, card.workspace) for one in halves]
    of_like = found if like is recipe else next(structures(like, card, roughly=True))[0]
    checked = of_like.sizes(check) | card.symbols
    a=_in_words(Trace(*halves).at(checked, Depth(CHECKED_PATTERNS, around.batches))); b=_in_words(of_check)
    print(len(a),len(b), check.batch_size, check.seq_len)
    n=0
    for x,y in zip(a,b):
        if x!=y:
            print("TRACE ",x); print("DIRECT",y); n+=1
            if n>4: break
which=sys.argv[1:]
for model in which:
    random.seed(3)
    cases=rt.wanted(rt.recipes(model)); random.shuffle(cases)
    for c in cases[:12]:
        if record(*c) is None: why(c[0],c[1]); break
