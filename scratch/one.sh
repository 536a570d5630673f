set -u
export PYTHONPATH=/tmp/site:$PWD HF_HUB_OFFLINE=1 TQDM_DISABLE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
for f in .dev/*.whl; do python3 -m zipfile -e $f /tmp/site; done
mkdir -p $OUT /tmp/h /tmp/site/gpu_memory_lab-0.1.0.dist-info
printf "Metadata-Version: 2.1\nName: gpu-memory-lab\nVersion: 0.1.0\n" > /tmp/site/gpu_memory_lab-0.1.0.dist-info/METADATA
cp memlab/data/records/nvidia-*h*.json $OUT/ 2>/dev/null
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
date
if [ "$1" != 0 ]; then
timeout $(( $1 + 10 )) python3 .dev/histories.py /tmp/h $1 6 2>&1 | tee $OUT/hist.log
tar -C /tmp -cJf $OUT/h.tar.xz h
date
fi
timeout $(( $2 + 20 )) python3 -m memlab.cli record --out $OUT --limit-minutes $3 --run-minutes $4 --note "lent for minutes, nothing else on it" 2>&1 | tee $OUT/record.log
date
ls -la $OUT
