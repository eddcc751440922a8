t0=$(date +%s); el() { echo "== $1 $(( $(date +%s)-t0 )) s"; }
export XLA_PYTHON_CLIENT_PREALLOCATE=false; N=13
mkdir -p P && cp -r ../.peers/* P/ && python3 -c "import lzma,shutil; shutil.copyfileobj(lzma.open('P/fa3.so.xz'), open('P/_vllm_fa3_C.abi3.so','wb'))"
for i in $(seq 0 $((N-1))); do timeout 100 python3 scratch/par.py $i $N > /tmp/o$i.txt 2>&1 & done; wait; el bench
cat /tmp/rows-*.jsonl > $OUT/decode.jsonl; grep -v '^{' /tmp/o*.txt | grep -v alarm | cut -c1-300 | head -20
if [ -n "$FA3" ]; then PEER=$PWD/P timeout 40 python3 scratch/peers_decode.py > $OUT/peers.txt 2>$OUT/peers_err.txt; el peers; cut -c1-150 $OUT/peers.txt; fi
