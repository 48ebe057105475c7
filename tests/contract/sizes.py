"""Calls of other sizes and settings than the examples of the cards: one a line, by operator and backend.

A line says what differs from the example ``usual``. Sizes are those at which a kernel takes another way:
tiles that are not full, several programs, vectors with a rest, channels that are read one by one.
"""

#: Of blocks, without gradients, for which layers of the same tokens are one product.
_BLOCKS = """
    gradient=none class_token=False approximate=quick scale=0.1
    gradient=none approximate=tanh dtype=bfloat16 channels=48 heads=3 head_dim=16 hidden=144
    gradient=none dtype=bfloat16 mixed=True
    gradient=none batch=3 height=7 width=1 channels=21 heads=7 head_dim=3
    gradient=none height=3 width=3 stride=1 hidden=72
    gradient=none height=3 width=8 stride=3 channels=20 head_dim=18 bare=True
    gradient=none height=13 width=14 head_dim=48 hidden=72 count=150 scores=avg scale=0.1
    gradient=none count=3 scores=avg
    gradient=none count=20 scores=cls
    gradient=none dtype=float16 count=9 scores=cls
    gradient=none height=7 width=1 channels=21 heads=7 head_dim=3 count=4 scores=avg class_token=False
    gradient=none height=3 width=8 stride=3 head_dim=18 count=23 scores=avg
    gradient=none reduce=squares mixes=True approximate=tanh
    gradient=none reduce=squares mixes=True approximate=quick bare=True layout=transposed
    gradient=none reduce=squares approximate=quick bare=True
    gradient=none reduce=squares mixes=True dtype=bfloat16 channels=48 heads=3 head_dim=16
    gradient=none reduce=squares dtype=bfloat16 channels=48 heads=3 head_dim=16
    gradient=none reduce=nothing mixes=True
    gradient=none reduce=squares ratio=1 mixes=True height=4 width=4
    gradient=none reduce=squares mixes=True height=7 width=5
    gradient=none reduce=squares ratio=3 mixes=True height=11 width=7
    gradient=none reduce=squares ratio=8 mixes=True height=17 width=25
    gradient=none reduce=squares ratio=8 mixes=True height=8 width=8
    gradient=none reduce=nothing mixes=True batch=1 height=1 width=1
    gradient=none reduce=squares ratio=1 mixes=True batch=1 height=1 width=1 channels=5 heads=1
    gradient=none reduce=squares ratio=3 mixes=True height=3 width=130 channels=17 heads=1 scale=0.1
    gradient=none reduce=squares mixes=True height=31 width=8 head_dim=18 hidden=530
    gradient=none reduce=nothing height=1 width=30 channels=6 head_dim=3 hidden=7
    gradient=none reduce=nothing count=9
    gradient=none reduce=nothing count=1
    gradient=none reduce=squares count=9
"""

#: Operator → backend → calls.
SIZES = {
    "attention": {
        "cpu": """
            batch=1 queries=3136 keys=784 heads=1 channels=64
            batch=1 queries=784 keys=196 heads=3 channels=64 dtype=bfloat16
            batch=1 queries=197 keys=50 heads=6 channels=64 dtype=float16
            batch=1 queries=577 keys=2304 heads=1 channels=64 dtype=float64
            position=rows queries=6 height=3 width=5 key_height=2 key_width=3 stride=2 class_token=True
            position=table height=2 width=20 key_height=2 key_width=20 class_token=True
            position=table height=2 width=3 key_height=3 key_width=4
        """,
        "triton": """
            batch=1 queries=70 keys=50 heads=6 channels=64 dtype=float16
            batch=1 queries=70 keys=196 heads=3 channels=64 dtype=bfloat16
            batch=1 queries=40 keys=784 heads=1 channels=64
            batch=1 queries=33 keys=20 channels=16 dtype=float16
            batch=1 queries=33 keys=120 channels=32 dtype=float16
            batch=1 queries=33 keys=150 channels=128 dtype=float16
            batch=1 queries=17 keys=20 heads=1 channels=128
            batch=1 queries=17 keys=150 heads=1 channels=32
        """,
        "sdpa": """
            bias=full excluded=most dtype=bfloat16
            bias=keys excluded=some
            queries=6 keys=70 channels=16 bias=matrix excluded=all
            queries=6 keys=5 channels=16 bias=matrix excluded=most
            position=rows queries=6 height=3 width=5 key_height=2 key_width=3 stride=2 class_token=True
            position=table height=2 width=20 key_height=2 key_width=20 class_token=True
            position=table height=2 width=3 key_height=3 key_width=4
        """,
    },
    "conv_projection": {
        "cpu": """
            batch=1 height=56 width=56 channels=64 class_token=False gradient=none
            batch=1 height=14 width=14 channels=384 mixed=True dtype=bfloat16 gradient=none
            batch=1 height=28 width=20 channels=192 class_token=False branches=3 dtype=float16 gradient=none
            batch=1 height=7 width=9 channels=37 stride=2 branches=1 dtype=float64 gradient=none
            batch=3 height=14 width=13 channels=100 statistics=averaged dtype=bfloat16 training=True
            batch=1 height=28 width=9 channels=37 class_token=False statistics=none training=True
            height=5 width=6 channels=20 kernel=5 stride=3 padding=4 dilation=2 dtype=float16 training=True
            height=5 width=6 kernel=2 padding=0 branches=1 bare=True dtype=float64
            height=1 width=3 channels=5 class_token=False branches=1 training=True
            height=16 width=16 padding=0 values=shifted training=True
        """,
        "triton": """
            height=1 width=1 channels=3 dtype=bfloat16 gradient=none
            height=3 width=4 channels=66 dtype=float16 gradient=none
            height=1 width=7 channels=4 branches=3 dtype=float16 training=True
            height=5 width=1 channels=2 dtype=float64 training=True
            height=4 width=3 channels=3 class_token=False dtype=bfloat16 training=True
            height=18 width=5 channels=40 branches=3 training=True
            height=4 width=4 channels=5 statistics=none bare=True training=True
            height=4 width=3 channels=8 branches=3 mixed=True dtype=float16 training=True
            height=4 width=3 channels=8 branches=3 mixed=True dtype=bfloat16 training=True
        """,
    },
    "conv_embedding": {
        "cpu": """
            height=20 width=26 inputs=3 kernel=7 stride=4 padding=2 bare=True
            height=10 width=13 inputs=3 layout=transposed
            height=14 width=14 inputs=320 channels=96
            height=14 width=14 inputs=320 channels=96 channels_last=True dtype=bfloat16
        """,
        "triton": """
            height=15 width=20 inputs=3 channels=64 kernel=7 stride=4 padding=2 dtype=float16
            height=15 width=20 inputs=3 channels=64 kernel=7 stride=4 padding=2 bare=True dtype=bfloat16
            height=33 width=41 inputs=3 channels=64 kernel=7 stride=4 channels_last=True dtype=float16
            height=7 width=3 inputs=3 channels=64 kernel=7 stride=4 padding=2 dtype=float64
            height=32 width=44 inputs=3 channels=48 kernel=7 stride=4 padding=2 dtype=float16
            height=10 width=8 inputs=1 channels=16 kernel=7 stride=4 padding=9 dtype=float16
            height=16 width=12 inputs=2 channels=16 kernel=4 stride=4 padding=0 dtype=float64
            height=8 width=12 inputs=3 channels=16 kernel=1 stride=3 padding=0 dtype=float16
            height=9 width=14 inputs=40 channels=24 layout=steps dtype=bfloat16
            height=9 width=14 inputs=40 channels=24 channels_last=True
            height=5 width=4 inputs=30 channels=300 dtype=float16
            height=8 width=8 inputs=32 kernel=8 stride=8 padding=0 channels_last=True dtype=float16
            batch=3 height=9 width=14 inputs=40 kernel=4 stride=4 padding=0 channels_last=True dtype=float64
            height=7 width=5 channels=300 kernel=2 padding=0 channels_last=True bare=True dtype=float16
            height=5 width=3 inputs=1 channels=1 kernel=1 stride=1 padding=0 channels_last=True dtype=bfloat16
            height=3 width=22 inputs=7 channels=160 kernel=3 stride=3 padding=0 channels_last=True bare=True
        """,
    },
    "conv_linear": {
        "triton": """
            batch=3 height=1 width=1 channels=16
            batch=1 height=5 width=7 channels=20 class_token=False
            batch=1 height=14 width=14 channels=8 branches=1
            batch=1 height=3 width=2 channels=70 class_token=False stride=2 branches=1
            batch=3 height=1 width=6 channels=3 class_token=False bare=True
            batch=2 height=4 width=3 channels=64 outputs=132 dtype=float64
            batch=1 height=3 width=4 channels=7 dtype=float16
            batch=1 height=3 width=4 channels=66 dtype=float16 mixed=True
            batch=1 height=3 width=4 channels=66 dtype=bfloat16
            batch=2 height=5 width=7 channels=196 outputs=72
            batch=1 height=9 width=14 channels=260 class_token=False bare=True dtype=float16
            batch=3 height=1 width=6 channels=200 branches=2 outputs=520 dtype=bfloat16
        """
    },
    "depthwise_conv_gelu": {
        "cpu": """
            height=35 width=9 channels=40
            height=35 width=9 channels=40 approximate=tanh dtype=bfloat16
            height=7 width=7 channels=300 approximate=quick dtype=float16
            height=7 width=7 channels=300 dtype=float64
        """,
        "triton": """
            channels=64 approximate=tanh dtype=bfloat16
            batch=1 height=1 width=1 channels=1 bare=True
            batch=3 height=1 width=5 channels=3 dtype=bfloat16
            height=4 width=1 channels=66 dtype=float16
            batch=1 height=2 width=9 channels=130 approximate=quick dtype=float16
        """,
    },
    "linear": {
        "convolution": "leading=rows rows=2500 channels=33",
        "float32": "leading=rows rows=2500 channels=33 outputs=24 bare=False dtype=float16",
    },
    "linear_gelu": {
        "triton": """
            leading=rows rows=80 channels=64 outputs=64 approximate=quick dtype=float16
            leading=rows rows=80 channels=16 outputs=512 approximate=quick
            leading=rows rows=72 channels=3 outputs=33 bare=True approximate=tanh dtype=float64
        """
    },
    "linear_add": {
        "triton": """
            leading=rows rows=80 channels=40 outputs=192 dtype=bfloat16
            leading=rows rows=80 channels=32 outputs=384 dtype=float16
            leading=rows rows=7 channels=1 outputs=1
        """
    },
    "linear_add_layer_norm": {
        "triton": """
            leading=rows rows=80 channels=16 outputs=512 shifted=True dtype=float16
            leading=rows rows=80 channels=32 outputs=384 shifted=True
            leading=rows rows=33 channels=72 outputs=72 dtype=bfloat16
        """
    },
    "layer_norm_mlp": {
        "triton": """
            leading=rows rows=130 channels=64 outputs=256 dtype=float16
            leading=rows rows=130 channels=64 outputs=256 approximate=tanh dtype=bfloat16
            leading=rows rows=130 channels=64 outputs=256 approximate=quick
            leading=rows rows=1 channels=64 outputs=256 dtype=float64
            leading=rows rows=3 channels=20 outputs=36 approximate=quick dtype=float16
            leading=rows rows=40 channels=100 outputs=70 approximate=quick dtype=bfloat16
        """
    },
    "reduction_linear": {
        "triton": """
            batch=3 height=9 width=14 channels=40 kernel=4 outputs=40 channels_last=True dtype=float16
            batch=3 height=8 width=16 channels=32 kernel=8 outputs=32 layers=1 dtype=bfloat16
            batch=3 height=7 width=5 channels=300 kernel=2 outputs=70 layers=3 dtype=float16
            batch=3 height=5 width=3 channels=1 kernel=1 outputs=1 dtype=float64
            batch=3 height=3 width=22 channels=160 kernel=3 outputs=7 bare=True dtype=bfloat16
        """
    },
    "segmentation_head": {
        "cpu": """
            height=3 width=113 inputs=5 channels=33 outputs=17 others=4
            height=3 width=5 inputs=17 channels=65 outputs=1000 dtype=bfloat16
            height=3 width=5 inputs=17 channels=65 outputs=2 dtype=float16
            height=31 width=45 inputs=16 channels=768 outputs=150
        """,
        "triton": """
            height=13 width=21 inputs=24 channels=40 outputs=19 dtype=float16
            height=13 width=21 inputs=24 channels=40 outputs=19 others=4 channels_last=True dtype=bfloat16
            height=3 width=5 inputs=7 channels=33 outputs=300 bare=True
            height=1 width=1 inputs=1 channels=1 outputs=2 dtype=float16
            height=2 width=3 inputs=5 channels=9 outputs=4
        """,
    },
    "resized_argmax": {
        "triton": """
            height=5 width=6 channels=19 out_height=20 out_width=24 channels_last=True dtype=float16
            height=5 width=6 channels=150 out_height=9 out_width=24 dtype=bfloat16
            height=5 width=6 channels=2 out_height=1 out_width=1
            height=7 width=11 channels=19 out_height=13 out_width=37 dtype=float16
            height=1 width=1 channels=19 out_height=20 out_width=24
            height=5 width=6 channels=19 out_height=5 out_width=6 dtype=bfloat16
        """
    },
    "depth_head": {
        "cpu": """
            height=21 width=18 inputs=64 channels=64
            height=1 width=33 inputs=5 channels=6 dtype=bfloat16
            height=33 width=1 inputs=5 channels=6 dtype=float16
            height=3 width=16 inputs=5 channels=6
            height=18 width=31 inputs=5 channels=6 dtype=bfloat16
            height=4 width=63 inputs=5 channels=6
        """
    },
    "transformer_block": dict.fromkeys(("cpu", "composed"), _BLOCKS),
    "layer_norm": {"cpu": "rows=2 channels=8192\nrows=37 channels=192 shifted=True dtype=bfloat16"},
    "add_layer_norm": {"cpu": "rows=2 channels=8192\nrows=37 channels=192 result=float16 dtype=bfloat16"},
    "layer_norm_gelu": {"cpu": "rows=37 channels=192 dtype=float16\nrows=2 channels=8192 approximate=quick"},
    "gelu": {"cpu": "rows=2 channels=8192 approximate=tanh\nrows=37 channels=192 dtype=bfloat16"},
}

#: What every instruction set computes in every dtype that it serves, by operator, besides the usual examples.
IN_EVERY_SET = {
    "attention": "queries=31 keys=300 heads=3 channels=20",
    "conv_projection": "height=7 width=21 channels=37 training=True\nheight=7 width=21 kernel=5 stride=3",
    "conv_embedding": """
        height=41 width=30 inputs=5 channels=80 kernel=7 stride=4 padding=2
        height=41 width=30 inputs=5 channels=80 kernel=7 stride=4 padding=2 channels_last=True
    """,
    "depthwise_conv_gelu": "height=7 width=21 channels=37 approximate=quick",
    "depth_head": "height=9 width=17 inputs=17\nheight=9 width=17 inputs=17 channels=9 channels_last=True",
    "layer_norm_gelu": "rows=37 channels=65\nrows=37 channels=65 approximate=tanh",
    "resized_argmax": """
        height=5 width=6 out_height=20 out_width=24 channels_last=True
        height=5 width=6 out_height=7 out_width=24 channels=1000
        height=9 width=8 out_height=4 out_width=3
        height=1 width=1 channels=1
    """,
    "linear_int8": "leading=rows rows=40 channels=132 outputs=37\nleading=rows rows=17 channels=31 outputs=1",
    "segmentation_head": """
        height=9 width=14 inputs=17 channels=65 outputs=33 others=4
        height=9 width=14 inputs=17 channels=65 outputs=33 others=4 channels_last=True
    """,
    "transformer_block": """
        height=5 width=7 channels=37 heads=1 head_dim=37 hidden=70 class_token=False
        height=6 width=5 channels=19 heads=3 head_dim=11 hidden=530 approximate=quick
        height=9 width=14 channels=5 heads=1 head_dim=17 hidden=9 kernel=5 count=17 scores=cls
        height=11 width=7 channels=17 heads=2 head_dim=9 hidden=33 reduce=squares ratio=3 mixes=True
        height=3 width=65 channels=8 heads=2 head_dim=4 hidden=530 reduce=nothing mixes=True approximate=tanh
        height=7 width=5 channels=33 heads=1 head_dim=33 hidden=40 reduce=squares ratio=2
    """,
}

#: Calls that a backend refuses: operator, backend, what differs from ``usual``, how the reason begins.
REFUSED = """
    attention cpu: bias=full | takes no bias on a CPU
    attention triton: bias=full | a bias is left to masks of PyTorch's attention
    attention cpu: channels=257 | heads have 257 channels, more than 256
    attention triton: channels=129 | heads have 129 channels, more than 128
    attention triton: batch=0 | the batch is empty
    conv_projection cpu: kernel=17 padding=8 | has kernels of up to 16×16, not 17×17
    conv_projection triton: stride=3 | serves at most 3 convolutions of 3×3
    conv_projection triton: padding=2 | serves at most 3 convolutions of 3×3
    conv_projection triton: summands=2 | a branch is a sum
    conv_projection triton: dilation=2 | serves at most 3 convolutions of 3×3
    conv_projection triton: kernel=5 padding=2 | serves at most 3 convolutions of 3×3
    conv_projection triton: branches=4 | serves at most 3 convolutions of 3×3
    conv_projection cpu: summands=5 | sums up to 4 convolutions, not 5
    conv_linear triton: summands=2 | a branch is a sum
    conv_linear triton: padding=2 | serves at most 3 convolutions of 3×3
    conv_linear triton: stride=2 | serves at most 3 convolutions of 3×3
    conv_linear triton: kernel=1 | serves at most 3 convolutions of 3×3
    conv_linear triton: channels=516 dtype=float64 | tokens have 516 channels, more than 512
    conv_linear triton: outputs=0 | the batch or an output is empty
    conv_linear triton: outputs=600 | tokens have 600 channels, more than 512
    conv_embedding triton: height=9 width=9 channels=5000 | tokens have 5000 channels, more than 4096
    depthwise_conv_gelu triton: batch=0 | the batch is empty
    layer_norm_mlp triton: channels=129 | rows have 129 channels, more than 128
    layer_norm_mlp triton: rows=0 | there are no rows
    layer_norm_mlp triton: channels=64 outputs=520 | 520 hidden features of 64 channels do not fit
    linear convolution: dtype=float64 | has no advantage in float64
    linear float32: dtype=float32 | serves 16-bit tensors only
    linear float32: dtype=bfloat16 gradient=all | has no gradients
    linear_gelu triton: rows=0 | the batch is empty
    linear_add_layer_norm triton: outputs=513 | rows of 513 channels, more than 512
    reduction_linear triton: dtype=float32 | float32 would need more registers than there are
    reduction_linear triton: channels=513 kernel=1 dtype=float16 | tokens have 513 channels, more than 512
    resized_argmax cpu: dtype=float64 | serves float32, bfloat16 and float16
    resized_argmax triton: dtype=float64 | serves float32, bfloat16 and float16
    resized_argmax triton: batch=0 | the batch is empty
    segmentation_head triton: dtype=float64 | serves float32, bfloat16 and float16
    segmentation_head triton: batch=0 | the batch is empty
    quantize_rows cpu: dtype=float64 | serves float32, bfloat16 and float16
    quantize_rows cpu: to=float8_e4m3fn | rounds to int8 only, not to float8_e4m3fn
    quantize_rows triton: rows=0 | the batch is empty
    quantize_rows triton: channels=8193 | rows of 8193 channels, more than 8192
    gelu_quantize triton: dtype=float64 | float64 is not rounded
    linear_int8 cpu: dtype=float64 | serves float32, bfloat16 and float16
    linear_int8 cpu: to=float8_e4m3fn | multiplies int8 only, not float8
    transformer_block cpu: dtype=float64 | serves float32, bfloat16 and float16
    transformer_block cpu: head_dim=260 heads=1 | heads have 260 channels, more than 256
"""
