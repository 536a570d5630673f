import os, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
NAMES = """distilbert 32x128
bert-base 16x512 bf16-amp sdpa freeze=embeddings,6
gpt2 4x1024 bf16-amp sdpa adamw_torch_fused
modernbert-base 16x512 bf16-amp sdpa padded
modernbert-base 16x512 bf16-amp sdpa
roberta-base 16x256 bf16-amp sdpa
deberta-v3-base 4x512
qwen3-0.6b 4x1024 bf16 sdpa loss=chunked
gemma-3-1b 1x2048 bf16 sdpa checkpointing
llama-3.2-1b 2x512 fp16-amp sdpa lora_rank=16 base=nf4
llama-3.2-3b 1x1024 bf16 eager lora_rank=16 base=fp4 no_upcast
qwen2.5-0.5b 4x1024 fp16-amp sdpa lora_rank=16
phi-4-mini 1x2048 bf16 sdpa lora_rank=16 loss=chunked checkpointing
smollm3-3b 1x2048 bf16 sdpa step_in_backward checkpointing
gpt2 2x1024 accumulation=4 adamw_torch_loop
bert-base 8x512 adamw_8bit
bert-base 8x512 adafactor
bert-base 8x512 sdpa task=masked-lm
bert-large 4x512 bf16 sdpa lion_8bit
qwen2.5-0.5b 2x1024 bf16-amp sdpa lora_rank=16 base=int8
llama-3.2-1b 1x2048 bf16 sdpa paged_adamw_8bit
llama-3.2-1b 1x4096 bf16 sdpa activation_offload non-reentrant
t5-3b 1x512 bf16 adafactor checkpointing
bert-base 8x512 lora_rank=8 lora_dropout=0.1
qwen3-1.7b 2x2048 bf16-amp sdpa checkpointing max_grad_norm=1.0
gpt2 4x1024
bert-large 8x512""".splitlines()
folder = sys.argv[1]; os.makedirs(folder, exist_ok=True)
limit = float(sys.argv[2]); began = time.time()
def one(pair):
    i, name = pair
    left = limit - (time.time() - began)
    if left < 12: return f"left {name}"
    try:
        r = subprocess.run([sys.executable, ".dev/history.py", f"{folder}/{i:02}.json.gz", name], capture_output=True, text=True, timeout=left)
        return (r.stdout.strip() if r.returncode == 0 else f"FAILED {name}: {r.stderr.strip().splitlines()[-1:]}")
    except subprocess.TimeoutExpired: return f"timeout {name}"
with ThreadPoolExecutor(int(sys.argv[3])) as pool:
    for said in pool.map(one, enumerate(NAMES)): print(f"{time.time()-began:.0f}", said, flush=True)
