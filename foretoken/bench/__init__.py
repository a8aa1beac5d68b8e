"""The room of measurement: everything here runs or describes engines, and nothing that serves or drafts needs it.

- `compare` measures drafters beside plain decoding, `loss` says where speed is lost, `verify` compares texts.
- `grid`, `sweep` and `plots` measure and draw many settings; `serving` puts a load on servers, ours or others'.
- `workload` has the prompts, `speed_report` the figures of public benchmarks, `quality` the effect of quantization.
- `cost_twin` and `padding` make models of realistic cost.

Commands call these modules, and `planning` predicts from them. Text and tables are printed in `foretoken.cli` alone.
"""
