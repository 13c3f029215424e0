"""Mistakes planted in the kernels, each with the one check and the mode of the emulator that catches it.

`python tests/mutants.py` prints the table of docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
PLAIN, CUDA_TEXT, RACE, ADDRESS = "metal-forward", "cuda-text", "race", "address"


@dataclass(frozen=True)
class Mutant:
    """One mistake: `old` becomes `new` in the text of a kernel.

    where: module and name of the kernel's record, "kernel_checks.NOISE_PROBE", or a dialect of `dialect`.
    nth: which occurrence of `old`, counted from zero; None where there is only one. seen: how the check
    fails: "wrong" result, or the kind of the emulator's fault.
    """

    name: str
    where: str
    old: str
    new: str
    check: str
    mode: str = PLAIN
    seen: str = "wrong"
    nth: int | None = None

    @property
    def row(self) -> str:
        """Its row of the table."""
        return f"| `{self.where}` | {self.name} | {self.check} | {self.mode} | {self.seen} |"


def table() -> str:
    """All mutants in Markdown."""
    head = ["| kernel | planted mistake | caught by the check | mode | seen as |", "|---|---|---|---|---|"]
    return "\n".join(head + [mutant.row for mutant in MUTANTS])


MUTANTS = [
    # --- the pass over W2: barriers, bounds, order, reduction
    Mutant("no barrier after the latent is staged", "argmax.SCAN", BARRIER, "", "argmax", RACE, "race", nth=0),
    Mutant("no barrier before the SIMD-groups' maxima are read", "argmax.SCAN", BARRIER, "", "argmax", RACE,
           "race", nth=1),
    Mutant("barrier for half of the SIMD-groups", "argmax.SCAN", BARRIER, f"if (simd < 4) {BARRIER}", "argmax",
           seen="divergent barrier", nth=1),
    Mutant("barrier for the wrong memory", "argmax.SCAN", "mem_flags::mem_threadgroup", "mem_flags::mem_device",
           "argmax", RACE, "race", nth=0),
    Mutant("one row too many", "argmax.SCAN", "inside = row < V;", "inside = row <= V;", "argmax", ADDRESS, "bounds"),
    Mutant("last row left out", "argmax.SCAN", "inside = row < V;", "inside = row < V - 1;", "every base logit wins"),
    Mutant("rows past the end are read", "argmax.SCAN", "row = row < V ? row : V - 1;  // no lane", "// no lane",
           "argmax", ADDRESS, "bounds"),
    Mutant("maximum starts at zero", "argmax.SCAN", "best[b] = -INFINITY;", "best[b] = 0.0f;",
           "argmax of negative logits"),
    Mutant("the higher index wins a tie", "argmax.SCAN", "index < other", "index > other", "argmax among equals"),
    Mutant("ties are left as they come", "argmax.SCAN", "(value == than && index < other)", "false",
           "argmax among a few equals"),
    Mutant("reduction over sixteen lanes", "argmax.SCAN", "uint d = 16;", "uint d = 8;", "every base logit wins"),
    Mutant("only the first SIMD-group counts", "argmax.SCAN", "uint k = 1; k < 8", "uint k = 1; k < 1",
           "every base logit wins"),
    Mutant("last SIMD-group left out", "argmax.SCAN", "uint k = 1; k < 8", "uint k = 1; k < 7",
           "every base logit wins"),
    Mutant("threadgroups overlap when there are steps", "argmax.SCAN", "(group * STEPS + step)", "(group + step)",
           "base logits win in two steps"),
    Mutant("one step only", "argmax.SCAN", "step < STEPS", "step < 1", "base logits win in two steps"),
    Mutant("every lane keeps the first row's sum", "argmax.SCAN", "if (turn == part)", "if (turn == 0)", "argmax"),
    Mutant("lanes of a row read different rows", "argmax.SCAN", "lane / LANES * LANES + turn", "lane + turn", "argmax"),
    Mutant("pieces of a row in another order than x", "argmax.SCAN", "(p * LANES + part) * PACK + k]",
           "(part * pieces + p) * PACK + k]", "every row wins float32"),
    Mutant("half of a row's lanes are added", "argmax.SCAN", "uint d = LANES / 2", "uint d = LANES / 4", "argmax"),
    Mutant("the bias of a group is added for the last piece only", "argmax.SCAN", "x[b] + p * PACK, sums[b][p])",
           "x[b] + p * PACK, sums[b][0])", "argmax of two pieces a lane"),
    Mutant("a tile reads requests past the last", "argmax.SCAN",
           "const uint request = first + b < B ? first + b : B - 1;", "const uint request = first + b;", "argmax",
           ADDRESS, "bounds"),
    Mutant("a tile writes requests past the last", "argmax.SCAN", "tid < TILE && first + tid < B", "tid < TILE",
           "argmax", ADDRESS, "bounds"),
    Mutant("tiles write to one place", "argmax.SCAN", "out_value[(first + tid) * PARTS", "out_value[tid * PARTS",
           "argmax", RACE, "race"),
    Mutant("requests of a tile share one maximum", "argmax.SCAN", "best_value[b * 8 + simd]", "best_value[simd]",
           "argmax"),
    Mutant("base logits of the first slot for all", "walk.GREEDY_SLOT", "(request * SLOTS + at_slot) * COLUMNS",
           "request * SLOTS * COLUMNS", "walk of seven slots"),
    # --- reading rows
    Mutant("zero point added once, not for every number", "argmax.SCAN", "affine[1] * sum", "affine[1]",
           "argmax 8bit-group64"),
    Mutant("no scale", "argmax.SCAN", "affine[0] * dot", "dot", "argmax 4bit-group64"),
    Mutant("zero point is the scale", "argmax.SCAN", "static_cast<float>(biases[group])",
           "static_cast<float>(scales[group])", "argmax 8bit-group64"),
    Mutant("group counted in pieces", "argmax.SCAN", "at * PACK / GROUP", "at / GROUP", "argmax 8bit-group32"),
    Mutant("group of the next row", "argmax.SCAN", "row * (WIDTH / GROUP)", "(row + 1) * (WIDTH / GROUP)",
           "argmax 8bit-group32", ADDRESS, "bounds"),
    Mutant("nibbles from the top", "argmax.SCAN", "word >> (4 * k)", "word >> (28 - 4 * k)", "argmax 4bit-group32"),
    Mutant("bytes from the top", "argmax.SCAN", "word >> (8 * k)", "word >> (24 - 8 * k)", "argmax 8bit-group128"),
    Mutant("five bits of a nibble", "argmax.SCAN", "& 0xfu", "& 0x1fu", "argmax 4bit-group128"),
    Mutant("halves of a word exchanged", "argmax.SCAN",
           "out[0] = ds_half(word & 0xffffu); out[1] = ds_half(word >> 16)",
           "out[1] = ds_half(word & 0xffffu); out[0] = ds_half(word >> 16)", "every row wins float16"),
    Mutant("bfloat16 read as float16", "argmax.SCAN", "out[1] = ds_bfloat(word >> 16)", "out[1] = ds_half(word >> 16)",
           "argmax bfloat16"),
    Mutant("a word of a piece read twice", "argmax.SCAN", "(words.z, out + 2 * step)", "(words.y, out + 2 * step)",
           "every row wins bfloat16"),
    Mutant("W1 without its zero points", "walk.GREEDY_SLOT", "affine[0] * piece[column % PACK] + affine[1]",
           "affine[0] * piece[column % PACK]", "walk"),
    # --- noise and sampling
    Mutant("wrong half of a counter pair", "kernel_checks.NOISE_PROBE", "second ? x1 : x0", "second ? x0 : x1",
           "noise of an even size"),
    Mutant("middle word of an odd size", "kernel_checks.NOISE_PROBE", "odd != 0 && at == half_size", "false",
           "noise of an odd size"),
    Mutant("second half shifted by one", "kernel_checks.NOISE_PROBE", "at - half_size - odd", "at - half_size",
           "noise of an odd size"),
    Mutant("first half paired with the wrong word", "kernel_checks.NOISE_PROBE", "at + half_size + odd",
           "at + half_size", "noise of an odd size"),
    Mutant("sixteen rounds, not twenty", "kernel_checks.NOISE_PROBE", "i < 5", "i < 4", "noise of an even size"),
    Mutant("key schedule without its counter", "kernel_checks.NOISE_PROBE", "% 3] + i + 1", "% 3] + i",
           "noise of an even size"),
    Mutant("a word that rounds to one is infinite", "kernel_checks.NOISE_PROBE", "u < 0.99999994f ? u : 0.99999994f",
           "u", "noise at the largest word"),
    Mutant("no temperature", "sample.SCAN", "total * scale[0] +", "total +", "sample when cold"),
    Mutant("kept logits are scaled", "sample.SCAN", "= total;", "= total * scale[0];", "sample when cold"),
    Mutant("kept logits of all requests in one row", "sample.SCAN", "corrected[request * V + row]", "corrected[row]",
           "sample", RACE, "race"),
    Mutant("noise of another vocabulary", "sample.SCAN", "row, V);", "row, V - 1);", "sample among equals"),
    Mutant("key of the first request", "sample.SCAN", "(request * SLOTS + at_slot) * 2", "at_slot * 2", "sample"),
    Mutant("key of the first slot", "walk.SAMPLED_SLOT", "(request * SLOTS + at_slot) * 2", "request * SLOTS * 2",
           "walk sampled"),
    # --- the walk
    Mutant("no second barrier in the fold", "walk.GREEDY_SLOT", f"{BARRIER}  // before anybody", "// before anybody",
           "walk", RACE, "race"),
    Mutant("no first barrier in the fold", "walk.GREEDY_SLOT", BARRIER, "", "walk", RACE, "race", nth=0),
    Mutant("last partial maximum left out", "walk.GREEDY_SLOT", "k < NPART", "k < NPART - 1", "walk"),
    Mutant("fold starts at zero", "walk.GREEDY_SLOT", "float mine = -INFINITY;", "float mine = 0.0f;",
           "walk of negative logits"),
    Mutant("partial maxima of the tile's first request", "walk.GREEDY_SLOT", "part_value[(request)",
           "part_value[(first)",
           "walk"),
    Mutant("the first request's token for all", "walk.GREEDY_SLOT", "token[request] =", "token[0] =", "walk", RACE,
           "race"),
    Mutant("W1 rows of a tile in one place", "walk.GREEDY_SLOT", "shared_latent[b * WIDTH + k] =", "shared_latent[k] =",
           "walk", RACE, "uninitialised"),
    Mutant("last token of the first request only", "argmax.LAST", "token[group] =", "token[0] =", "walk", RACE, "race"),
    # --- latents
    Mutant("gate turned over", "walk.GATED", "ds_sigmoid(out[0]) * x[j]", "(1.0f - ds_sigmoid(out[0])) * x[j]",
           "walk gated"),
    Mutant("columns of the hidden states", "walk.GATED", "AT / MIX_PACK + at", "at", "walk gated"),
    Mutant("return before the barrier", "walk.GATED", BARRIER,
           f"if (group * 8 + simd >= RANK) return;\n{BARRIER}", "walk gated", seen="divergent barrier", nth=2),
    Mutant("no barrier before the W1 row is read", "walk.GATED", BARRIER, "", "walk gated", RACE, "race", nth=2),
    Mutant("reduction over eight lanes", "walk.GATED", "d >>= 1) sum +=", "d >>= 2) sum +=", "walk gated"),
    Mutant("recurrent gate turned over", "walk.RNN", "gate * x[j] + (1.0f - gate)", "(1.0f - gate) * x[j] + gate",
           "walk rnn"),
    Mutant("state not carried", "walk.RNN", "x[k] = state[request * RANK + k];", "x[k] = 0.0f;", "walk rnn"),
    Mutant("state of the first request", "walk.RNN", "state[request * RANK + k]", "state[k]", "walk rnn"),
    Mutant("latent from the candidate", "walk.RNN", "precise::tanh(out[2])", "precise::tanh(out[1])", "walk rnn"),
    Mutant("the output sees the new state", "walk.RNN", "precise::tanh(out[2])",
           "precise::tanh(next_state[request * RANK + j])", "walk rnn"),
    Mutant("hidden states of the first slot", "walk.RNN", "(request * SLOTS + slot[0]) * 3", "request * SLOTS * 3",
           "walk rnn"),
    Mutant("gates interleaved", "walk.RNN", "g * RANK + j, AT", "j * 3 + g, AT", "walk rnn"),
    Mutant("the state's half of the projection only", "walk.RNN", "at < INPUTS / MIX_PACK", "at < RANK / MIX_PACK",
           "walk rnn"),
    Mutant("every second piece when there are more than lanes", "walk.RNN", "at += 32", "at += 64",
           "walk rnn of rank 128"),
    # --- candidates and their certificate
    Mutant("equality is certified", "topk.REST", "folded > floor", "folded >= floor", "the certificate is strict"),
    Mutant("floor of the first slot", "topk.REST", "floor[first * SLOTS + at_slot]", "floor[first * SLOTS]", "topk"),
    Mutant("bound of the token found", "topk.REST", "bound[previous]", "bound[found]", "topk"),
    Mutant("bound subtracted", "topk.REST", "+ bound[previous]", "- bound[previous]", "topk"),
    Mutant("no bound", "topk.REST", " + bound[previous]", "", "topk"),
    Mutant("only some threads leave", "topk.REST", "if (sure) {", "if (sure && simd > 0) {", "topk",
           seen="divergent barrier"),
    Mutant("the token leaves without its flag", "topk.REST", "if (group == 0 && tid == 0) certified",
           "if (!sure && group == 0 && tid == 0) certified", "topk"),
    Mutant("the certified token is the one before", "topk.REST", "group == 0 ? found", "group == 0 ? previous", "topk"),
    Mutant("candidates of the first slot", "topk.CANDIDATES", "(first * SLOTS + at_slot) * V + row",
           "first * SLOTS * V + row", "topk", nth=0),
    Mutant("a candidate's place for its token", "topk.CANDIDATES", "at[b] = row; }", "at[b] = row0 + lane; }", "topk"),
    # --- accept, greedy
    Mutant("maximum of a row starts at zero", "accept.MAXIMA", "float mine = -INFINITY;", "float mine = 0.0f;",
           "accept greedy among equals"),
    Mutant("ties of a row are left as they come", "accept.MAXIMA", "(value == than && index < other)", "false",
           "accept greedy among equals"),
    Mutant("logits of the first row", "accept.MAXIMA", "logits[row * V + v]", "logits[v]", "accept greedy"),
    Mutant("one logit too many", "accept.MAXIMA", "if (v < V)", "if (v <= V)", "accept greedy", ADDRESS, "bounds"),
    Mutant("parts of a row overlap", "accept.MAXIMA", "(group * STEPS + step)", "(group + step)",
           "accept greedy in two steps"),
    Mutant("last SIMD-group of a row left out", "accept.MAXIMA", "uint k = 1; k < 8", "uint k = 1; k < 7",
           "every token is best"),
    Mutant("no barrier in the maxima of a row", "accept.MAXIMA", BARRIER, "", "accept greedy", RACE, "race"),
    Mutant("drafts after a wrong one count", "accept.GREEDY", "running = running && drafts", "running = drafts",
           "accept greedy"),
    Mutant("last draft is never tested", "accept.GREEDY", "row < uint(limits[group])",
           "row + 1 < uint(limits[group])", "accept greedy"),
    Mutant("drafts that were not verified count", "accept.GREEDY", "row < uint(limits[group])", "row + 1 < ROWS",
           "accept greedy of limited drafts"),
    Mutant("limit of the first request", "accept.GREEDY", "limits[group]", "limits[0]",
           "accept greedy of limited drafts"),
    Mutant("drafts of another request", "accept.GREEDY", "drafts[group * (ROWS - 1) + row]",
           "drafts[group * ROWS + row]",
           "accept greedy", ADDRESS, "bounds"),
    Mutant("no second barrier between rows", "accept.GREEDY", f"{BARRIER}  // before anybody", "// before anybody",
           "accept greedy", RACE, "race"),
    # --- accept, sampled
    Mutant("sum not rescaled to the new maximum", "accept.SUMS", "*sum * precise::exp((*top - to) * scale)", "*sum",
           "accept sampled near the limit"),
    Mutant("sum at another temperature", "accept.SUMS", "precise::exp((other_top - to) * scale)",
           "precise::exp(other_top - to)", "accept sampled when hot"),
    Mutant("sum over sixteen lanes", "accept.SUMS", "uint d = 16;", "uint d = 8;", "accept sampled near the limit"),
    Mutant("last SIMD-group's sum left out", "accept.SUMS", "uint k = 1; k < 8", "uint k = 1; k < 7",
           "accept sampled near the limit"),
    Mutant("no barrier before the sums are joined", "accept.SUMS", BARRIER, "", "accept sampled", RACE, "race"),
    Mutant("log of the sum dropped", "accept.TESTS", "* scale[0] - log_sum);", "* scale[0]);",
           "accept sampled near the limit"),
    Mutant("accept test without temperature", "accept.TESTS", "(logit - top) * scale[0]", "(logit - top)",
           "accept sampled when hot"),
    Mutant("q of token zero", "accept.TESTS", "log_q[draft * V + token]", "log_q[draft * V]",
           "accept sampled near the limit"),
    Mutant("logits of the row after the draft", "accept.TESTS", "(group * ROWS + row) * V + token",
           "(group * ROWS + row + 1) * V + token", "accept sampled near the limit"),
    Mutant("u < p without q", "accept.TESTS", "uniforms[draft] * precise::exp(log_q[draft * V + token])",
           "uniforms[draft]", "accept sampled near the limit"),
    Mutant("no barrier between rows", "accept.TESTS", f"{BARRIER}  // before the next row", "// before the next row",
           "accept sampled", RACE, "race"),
    Mutant("softmax of the first row is kept", "accept.TESTS", "if (tid == 0) {  // what stays",
           "if (tid == 0 && row == 0) {  // what stays", "accept sampled"),
    Mutant("run off by one", "accept.TESTS", "run += running ? 1 : 0;", "run += 1;", "accept sampled"),
    Mutant("the residual is p", "accept.AFTER", "precise::exp(log_p) - q;", "precise::exp(log_p);", "accept sampled"),
    Mutant("residual without max", "accept.AFTER", "if (left > 0.0f)", "if (true)",
           "accept sampled of a small residual"),
    Mutant("tests go on behind the limit", "accept.TESTS", "row < uint(limits[group])", "row + 1 < ROWS",
           "accept sampled of limited drafts"),
    Mutant("q of a draft that was not verified", "accept.AFTER", "row < uint(limits[request])", "row + 1 < ROWS",
           "accept sampled of limited drafts"),
    Mutant("bonus row read from q", "accept.AFTER", "row < uint(limits[request])", "row < ROWS",
           "accept sampled of certain drafts", ADDRESS, "bounds"),
    Mutant("noise of the first request", "accept.AFTER", "keys[request * 2], keys[request * 2 + 1]", "keys[0], keys[1]",
           "accept sampled"),
    Mutant("residual row without temperature", "accept.AFTER", "(logit - normaliser[request * 2]) * scale[0]",
           "(logit - normaliser[request * 2])", "accept sampled when cold"),
    Mutant("normaliser of the first request", "accept.AFTER", "normaliser[request * 2 + 1]", "normaliser[1]",
           "accept sampled"),
    Mutant("no barrier before the masses are added", "accept.AFTER", BARRIER, "", "accept sampled", RACE, "race"),
    Mutant("mass of the first SIMD-group", "accept.AFTER", "k < 8; ++k) total", "k < 1; ++k) total",
           "accept sampled of a small residual"),
    Mutant("mass of one lane", "accept.AFTER", "mass += simd_shuffle_xor(mass, d)", "mass += 0.0f * d",
           "accept sampled of a small residual"),
    Mutant("mass of the first threadgroup", "accept.FINISH", "k < NPART; ++k) mass", "k < 1; ++k) mass",
           "accept sampled of a small residual"),
    Mutant("residual taken where nothing is left", "accept.FINISH", "mass > 1e-08f ?", "true ?",
           "accept sampled without a residual"),
    Mutant("p taken where a residual is left", "accept.FINISH", "mass > 1e-08f ?", "false ?",
           "accept sampled of a small residual"),
    Mutant("one draft after the run is kept", "accept.FINISH", "row < run ?", "row <= run ?", "accept sampled"),
    Mutant("drafts counted by rows", "accept.FINISH", "drafts[group * (ROWS - 1) + row]", "drafts[group * ROWS + row]",
           "accept sampled"),
    # --- the dialects
    Mutant("float16 bits as bfloat16", "dialect.METAL", "float(as_type<half>(ushort(bits)))",
           "as_type<float>(bits << 16)",
           "walk sampled"),
    Mutant("bfloat16 shifted too far", "dialect.METAL", "as_type<float>(bits << 16)", "as_type<float>(bits << 17)",
           "walk rnn"),
    Mutant("shuffle up instead of across", "dialect.CUDA", "__shfl_xor_sync", "__shfl_up_sync", "walk", CUDA_TEXT),
    Mutant("barrier left empty", "dialect.CUDA", "{ __syncthreads(); }", "{}", "walk", CUDA_TEXT),
    Mutant("SIMD-groups of sixteen", "dialect.CUDA", "(threadIdx.x >> 5)", "(threadIdx.x >> 4)", "walk", CUDA_TEXT,
           "bounds"),
    Mutant("grid position is the thread's", "dialect.CUDA", "threadgroup_position_in_grid blockIdx",
           "threadgroup_position_in_grid threadIdx", "walk", CUDA_TEXT),
]  # fmt: skip

if __name__ == "__main__":
    print(table())
