python3 scratch/try1.py gpu > $OUT/try1.txt 2>&1; cat $OUT/try1.txt | tail -14
timeout 70 python3 -m benchmarks decode d_64x4k --quantization fp8_e4m3 int8_token_head --by warp --ctas-per-sm 1 2 --stages 3 5 --out $OUT 2>&1 | cut -c1-330
timeout 40 python3 -m benchmarks decode d_64x4k --quantization none --by warp warpgroup --stages 3 --ctas-per-sm 1 2 --out $OUT 2>&1 | cut -c1-330
