B="python3 -m benchmarks decode --out $OUT"
timeout 75 $B --quantization fp8_e4m3 int8_token_head 2>&1 | cut -c1-230
timeout 22 $B d_64x4k --quantization fp8_e4m3 --layout HND NHD --stages 2 3 4 --ctas-per-sm 2 2>&1 | cut -c1-230
timeout 75 $B d_1x1k d_1x32k d_8x8k d_256x1k d_gptoss_64x4k d_ragged64 d_64x4k --by warp warpgroup 2>&1 | cut -c1-230
timeout 30 $B d_1x1k d_1x32k d_8x8k --quantization fp8_e4m3 --ctas-per-sm 1 2>&1 | cut -c1-230
