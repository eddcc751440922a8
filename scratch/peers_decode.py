import sys, os
sys.path.insert(0, os.environ["PEER"])
import workloads as W
W.PREFILL.clear()
import peers_torch as t
t.only = {"fa3_page16", "fa3_fp8_page16"}
t.ceilings = lambda: None
t.main()
