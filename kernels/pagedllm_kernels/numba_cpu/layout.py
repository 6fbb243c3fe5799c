"""Where things stand in the tables that compiled code reads.

Owner: numba_cpu. All are int64, and compiled code sees them as addresses.

The *job* holds what changes from step to step: counts, addresses of inputs, and addresses of
buffers. An *operation* is a record of ``RECORD`` fields, of which the first is its code. A
*frame* is at the start of each thread's scratch, and holds what the functions of one task
share, followed by the arguments of the tiles they call. A field named ``..._AT`` holds an
index into the job, so that a program outlives its buffers; others hold addresses, sizes, or
a float32 in their low half.
"""

from __future__ import annotations

LANES = 16  # numbers in a vector
RECORD = 48
FIELD = 8  # bytes
LINE = 64  # bytes of a cache line, and of 16 units of 4 bytes

# --- job ---------------------------------------------------------------------------------------
OPS, NUM_OPS, SYNC, THREADS, SCRATCH, SCRATCH_SIZE = range(6)
NUM_TOKENS, NUM_SEQS, NUM_LOGITS = range(6, 9)
TOKEN_IDS, POSITIONS, LOGIT_INDICES = range(9, 12)
QUERY_STARTS, CONTEXT_LENS, PAGE_TABLE, PAGE_TABLE_WIDTH, SLOT_MAPPING, PAGE_SIZE = range(12, 18)
FEW_ROWS = 18  # row counts below it go through inner tiles, others through outer ones
SPLIT_ROWS = 19  # row counts below it are kept in two rows each
PARTIALS = 20  # of attention split along the context
SPINS = 21  # waiting loops before a thread gives its core away
TILES = 22  # addresses of tiles, by number
QUERIES, TASKS = 24, 25  # attention's buffers; a program decides what follows
JOB_SIZE = 64

# --- operations --------------------------------------------------------------------------------
CODE = 0
EMBED, NORM, QUANTIZE, PACK, LINEAR, LINEAR_Q, WRITE, PLAN, ATTEND = range(1, 10)
ROUTE, SORT, COMBINE = range(10, 13)
EXPERT = 16  # added to the codes of PACK and LINEAR where each expert has rows of its own

# EMBED: out[t] = table[token_ids[t]] * scale; bits, scales and panel bytes of a quantised table
E_TABLE, E_WIDTH, E_OUT_AT, E_OUT_STRIDE, E_SCALE, E_BITS, E_SCALES, E_PANEL = range(1, 9)

# NORM: rows of ``in`` (through an index when there is one) scaled to a root mean square of 1
N_ROWS_AT, N_IN_AT, N_IN_OFFSET, N_IN_STRIDE, N_INDEX_AT = range(1, 6)
N_OUT_AT, N_OUT_OFFSET, N_OUT_STRIDE, N_WIDTH, N_WEIGHT, N_MODE, N_EPS, N_SCALE = range(6, 14)
STORE, STORE_F32, ADD = range(3)  # modes: as activations, as float32, added to float32 * scale

# QUANTIZE: rows of activations to int8; per group of them a float32 factor and an int32 start
Q_ROWS_AT, Q_IN_AT, Q_IN_STRIDE, Q_WIDTH, Q_OUT_AT, Q_FACTORS_AT = range(1, 7)

# PACK: panels of 16 rows, [units, 16], for outer tiles
P_ROWS_AT, P_IN_AT, P_IN_STRIDE, P_UNITS, P_OUT_AT = range(1, 6)

# LINEAR; and LINEAR_Q, whose stride is that of panels and whose units are groups
L_ROWS_AT, L_WEIGHT, L_STRIDE, L_SIZE, L_UNITS, L_IN_AT, L_IN_STRIDE, L_PACKED_AT = range(1, 9)
L_BIAS, L_OUT_AT, L_OUT_STRIDE, L_MODE, L_SCALE, L_CAP, L_ACTIVATION = range(9, 16)
L_FACTORS_AT, L_SCALES, L_BITS = range(16, 19)  # of LINEAR_Q: see ``quantized``
# modes besides STORE_F32 and ADD: activation(gate) * up, as activations; logits
GATED, LOGITS = 3, 4
SILU, GELU_TANH, GELU = range(3)

# PACK and LINEAR of experts: rows and first row of each, int64; bytes of one's weights
M_EXPERTS, M_COUNTS_AT, M_STARTS_AT, M_BYTES = range(19, 23)

# ROUTE, SORT (which has counts and starts besides) and COMBINE
R_EXPERTS, R_TOP, R_WIDTH, R_IN_AT, R_WEIGHT, R_NORMALIZE = range(1, 7)
R_CHOSEN_AT, R_SHARES_AT, R_ORDER_AT, R_PLACES_AT, R_OUT_AT, R_MODE, R_SCALE = range(7, 14)

# WRITE: rotate, then keys and values into their pages and queries beside their KV head
W_QUERY_AT, W_QUERY_OFFSET, W_QUERY_STRIDE = range(1, 4)
W_KEY_AT, W_KEY_OFFSET, W_KEY_STRIDE = range(4, 7)
W_VALUE_AT, W_VALUE_OFFSET, W_VALUE_STRIDE, W_IN_F32 = range(7, 11)
W_Q_NORM, W_K_NORM, W_EPS, W_HALF, W_COS, W_SIN = range(11, 17)

# PLAN: the tasks of ATTEND; ATTEND; and what WRITE shares with them
A_WINDOW, A_TASKS_AT = 17, 18
A_KEYS, A_VALUES, A_HEADS, A_KV_HEADS, A_DIM, A_VALUE_DIM = range(19, 25)
A_SCALE, A_CAP, A_SINKS, A_OUT_AT, A_OUT_STRIDE, A_OUT_F32 = range(25, 31)
A_GROUP = 31  # heads that share a KV head
A_UNITS = 32  # units of a key or a query
A_SLOTS = 33  # slots of a page, a multiple of 16
A_KEY_BYTES, A_VALUE_BYTES = 34, 35  # of one head in a page
A_WIDTH = 36  # bytes of a row of weighted values, float32, a multiple of 16
A_TILE_QUERIES = 37  # queries in a tile
A_PART_BYTES = 38  # of a tile's partial result: sums, then two lines of statistics per row
A_PER_BLOCK = 39  # pages in a block of keys
A_KEY_STRIDE, A_VALUE_STRIDE = 40, 41  # bytes from unit to unit of keys, and of values

# A task of ATTEND: int64 each, after the number of tasks, which takes the place of one
TASK = 8 * FIELD  # bytes
T_SEQ, T_HEAD, T_ROW, T_ROWS, T_FIRST, T_LAST, T_PART, T_PARTS = range(8)

# --- frames, and arguments of tiles ------------------------------------------------------------
F_TASK, F_ROWS, F_SUMS, F_STATS, F_KEYS, F_VALUES, F_SCORES, F_STRIDE = range(8)
F_PAGE, F_PAGES, F_NEXT, F_NEXT_PAGE = range(8, 12)

ARGS = 512  # bytes from the frame to the arguments of outer and inner tiles
MORE_ARGS = 640  # to those of weigh and transpose
O_A, O_A_STRIDE, O_A_LAST, O_LIST, O_STRIDE, O_UNITS, O_C, O_C_STRIDE, O_AHEAD = range(9)
I_W, I_W_STRIDE, I_W_LAST, I_X, I_X_STRIDE, I_X_LAST, I_UNITS, I_OUT, I_OUT_STRIDE = range(9)
V_P, V_P_STRIDE, V_LIST, V_PAGES, V_UNITS, V_LAST_UNITS, V_LAST_MASK = range(7)
V_OFFSET, V_STRIDE, V_C, V_C_STRIDE = range(7, 11)
X_SOURCE, X_STRIDE, X_LAST, X_TARGET, X_TARGET_STRIDE = range(5)
G_A, G_A_STRIDE, G_A_LAST, G_FACTORS, G_FACTOR_STRIDE, G_LIST, G_GROUPS, G_C, G_C_STRIDE = range(9)

# Numbers of tiles, to which the rows are added, or for MANY the columns and for FEW log2 of
# the rows of the input.
MANY, FIRST, REST, WEIGH_FIRST, WEIGH_REST, WEIGH_ONE, FEW, TURN = 0, 4, 11, 18, 25, 32, 39, 43
GROUPED_8, GROUPED_4, NUM_TILES = 44, 48, 52  # log2 of the rows is added, for many rows 3

# --- blocks of attention -----------------------------------------------------------------------
TILE_ROWS = 48  # queries times heads of the group in a task, unless the group alone is more
BLOCK_KEYS = 256  # keys between two updates of the softmax
PART_KEYS = 256  # a context is not split into parts of fewer keys

# --- blocks of products, and where their scratch lies -------------------------------------------
BLOCK = 32  # rows of weights in a task of many rows
PANEL = 48  # rows of input in one pass over them
GROUP = 192  # rows of input in a task
MAX_FEW = 64  # rows that the scratch of few rows holds
GROUP_ROWS = 48  # rows of quantised input in a task
GROUP_BLOCK = 8  # groups of columns, which stay in the cache for all rows of a task
RESULT_ROW = 2 * BLOCK * 4  # bytes of a row of results
PANELS = 768  # addresses of panels
WORK = 1024  # what is left for the operation
RESULT = WORK  # float32 [MAX_FEW, 2 * BLOCK], results by row
TURNED = RESULT + MAX_FEW * RESULT_ROW  # float32 [2 * BLOCK, PANEL], as tiles store them
STAGE = TURNED + 2 * BLOCK * PANEL * 4  # a copy of a block of weights, or of rows to pack


def linear_scratch_bytes(units: int) -> int:
    """Bytes of scratch that a product over ``units`` needs."""
    return STAGE + 2 * BLOCK * (units * 8 + LINE)  # widened to fp32, they take twice the room
