"""Run by test_stub_driver.py in a process of its own, where Triton compiles: what launches pass to the stub driver.

Prints JSON: for each check, the cases that failed.
"""

import itertools
import json
import sys
import warnings

from benchmarks.host import stub

DRIVER = stub.install()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from octavo.kernels import launch  # noqa: E402

INTEGERS = (0, 1, 2, 16, 17, 32, -1, -16, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1, 2**32 + 16, -(2**31), -(2**31) - 1)


@triton.jit
def tiny_kernel(x, y, rows, columns, factor, FLAG: tl.constexpr):
    offset = tl.program_id(0) * rows + columns + tl.arange(0, 1024)
    tl.store(y + offset, tl.load(x + offset) * factor + FLAG)


def tensors():
    x = torch.zeros(64, dtype=torch.float32)
    return (x, x), (x[1:], x), (x, x[3:]), (x[1:], x[1:]), (x.half(), x), (x.half()[1:], x)


def recorded(call):
    with DRIVER.recorded() as records:
        call()
    (record,) = records
    return record.key()


def launches_pass_what_triton_passes():
    failed = []
    steps = {flag: launch.Launch(kernel=tiny_kernel, constants={"FLAG": flag}, num_warps=4) for flag in (False, 1)}
    cases = [(n, 16, 2.0) for n in INTEGERS] + [(16, n, 0.5) for n in (1, 17, True)] + [(True, True, 1.0), (1, 1, 1)]
    for flag, step in steps.items():
        for x, y in tensors() if flag else tensors()[:1]:
            for rows, columns, factor in cases if y is x else cases[:4]:
                arguments = {"x": x, "y": y, "rows": rows, "columns": columns, "factor": factor}
                options = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
                expected = recorded(lambda: tiny_kernel[(3, 2)](**arguments, FLAG=flag, **options))  # noqa: B023
                for _ in range(2):
                    before = launch.THROUGH_TRITON.total()
                    actual = recorded(lambda: step.run((3, 2), arguments))  # noqa: B023
                    if actual != expected:
                        failed.append(f"{flag} {rows} {columns} {factor} {x.dtype} {x.data_ptr() % 16}")
                if launch.THROUGH_TRITON.total() != before:
                    failed.append(f"not direct: {flag} {rows} {columns} {factor}")
    return failed


def a_profilers_hooks_see_every_launch():
    seen, x = [], torch.zeros(64)
    step = launch.Launch(kernel=tiny_kernel, constants={"FLAG": 1}, num_warps=4)
    arguments = {"x": x, "y": x, "rows": 16, "columns": 16, "factor": 2.0}
    step.run((1,), arguments)
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    step.run((1,), arguments)
    triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    step.run((1,), arguments)
    return [] if len(seen) == 1 and seen[0].get()["name"] == "tiny_kernel" else [str(seen)]


def an_unwritable_cache_is_said_once():
    triton.knobs.cache.dir = "/dev/null/cache"
    x, failed = torch.zeros(64), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for flag in (5, 6):  # not compiled yet
            step = launch.Launch(kernel=tiny_kernel, constants={"FLAG": flag}, num_warps=4)
            before = DRIVER.launches
            step.run((1,), {"x": x, "y": x, "rows": 16, "columns": 16, "factor": 2.0})
            failed += [] if DRIVER.launches == before + 1 else [f"{flag} was not launched"]
    texts = [str(w.message) for w in warned if "octavo" in str(w.message)]
    return failed if len(texts) == 1 and "TRITON_CACHE_DIR" in texts[0] else [*failed, *texts, "warnings"]


def casts_pass_what_triton_passes():
    """The function generated for a plan launches as the general one, with the same outputs, and as a hook sees it."""
    from octavo.kernels.quantize import plan_pair, plan_quantize
    from octavo.numerics import RECIPES

    failed, recipe_plans = [], []
    x = torch.zeros(48, 64, dtype=torch.bfloat16)
    rows, columns = torch.ones(48, 1), torch.ones(1, 64)
    for recipe in RECIPES.values():
        for order in ("rows", "columns", "both"):
            recipe_plans.append((plan_quantize(x, recipe.x, order=order), None, None, None))
        if recipe.wgrad_g is not None and recipe.wgrad_g != recipe.dgrad_g:
            folds = (columns, rows) if recipe.folds_w else (None, None)
            recipe_plans.append((plan_pair(x, recipe.dgrad_g, folds[0], recipe.wgrad_g, folds[1]), *folds, None))
        if recipe.w.scale_dtype == torch.float32:  # others are converted, which allocates
            scale = torch.ones(recipe.w.granularity.scale_shape((48, 64)))
            recipe_plans.append((plan_quantize(x, recipe.w, order="columns", scale=scale), None, None, scale))
    block = torch.zeros(4096, dtype=torch.int32)
    for plan, *arguments in recipe_plans:
        for changed in (plan, plan.transposing(True, False), plan.transposing(False, True)):
            outputs, allocated = [], iter(())

            def empty(size, stride, dtype):
                out = next(allocated, None)  # noqa: B023
                if out is None:
                    outputs.append(out := torch.empty_strided(size, stride, dtype=dtype))  # noqa: B023
                return out

            changed._empty, changed.run, keys = empty, changed._run, []
            for run in (changed._run, lambda *a: changed.run(*a), changed._run):  # noqa: B023  the second is generated
                allocated = iter(outputs)
                with DRIVER.recorded() as records:
                    run(x, *arguments, lambda size, device, stream: (block, 32))
                keys.append([record.key() for record in records])
            if keys[0] != keys[1] or keys[1] != keys[2] or changed.run == changed._run:
                failed.append(f"{[step.kernel.fn.__name__ for step in changed._launches]}")
        before, seen = launch.THROUGH_TRITON.total(), []
        plan.run(x, *arguments)
        triton.knobs.runtime.launch_enter_hook.add(seen.append)
        plan.run(x, *arguments)
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
        if launch.THROUGH_TRITON.total() - before != len(seen) or len(seen) != len(plan._launches):
            failed.append(f"{len(seen)} launches were hooked of {[step.kernel.fn.__name__ for step in plan._launches]}")
    return failed


def product_operands(m, n, k, case, laid=lambda data: data):
    """Operands of a case, data contiguous along the contraction before `laid`."""
    from octavo.numerics.spec import QuantSpec
    from octavo.tensor import ScaledTensor

    operands, layout = [], case[2]
    for text, rows, transposed in ((case[0], m, layout[0] == "t"), (case[1], n, layout[1] == "n")):
        spec = QuantSpec.parse("e4m3/tensor" if text == "unit" else text)
        data = laid(torch.zeros(rows, k, dtype=torch.uint8)).view(spec.format.dtype)
        data = data.t() if transposed else data
        scale = None if text == "unit" else torch.ones(spec.granularity.scale_shape(tuple(data.shape)))
        operands.append(ScaledTensor(data, scale, spec))
    return *operands, layout


def products_pass_what_triton_passes():
    """A plan's general function and the generated one: TMA, Gluon and pointers; padded and moved operands; a bias."""
    from octavo.kernels.gemm import triton as products

    failed, kernels, ordinary = [], set(), launch.PreparedLaunch.__call__
    by_row, by_tensor = ("e4m3/row", "e4m3/row", "nt"), ("e5m2/tensor", "e4m3/tensor", "tn")
    blocks, dgrad = ("e4m3/1x128", "e4m3/128x128", "nt"), ("e4m3/row", "unit", "nn")
    bf16, bias = torch.bfloat16, torch.zeros(97)
    same = lambda x: x  # noqa: E731
    shifted = lambda x: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)  # noqa: E731
    by_column = lambda x: x.t().contiguous().t()  # noqa: E731
    cases = [  # case, shape, data, output, bias, fast accumulation, other arguments, generated
        (by_row, (300, 96, 512), same, bf16, bias[:96].bfloat16(), True, {}, True),
        (by_row, (300, 96, 512), same, torch.float32, bias[:96], False, {}, True),
        (dgrad, (48, 17, 64), same, bf16, None, False, {"config": 5}, True),
        (dgrad, (48, 17, 64), same, bf16, None, False, {"overlap": False}, True),
        (by_tensor, (1, 16, 16), same, torch.float16, None, False, {}, True),
        (by_row, (48, 17, 64), same, bf16, None, True, {"pointers": True}, True),
        (blocks, (130, 256, 384), same, bf16, bias[:96].repeat(3)[:256], True, {}, True),
        (by_row, (16, 32, 60), same, bf16, None, True, {}, False),
        (dgrad, (16, 32, 64), by_column, bf16, None, False, {}, False),
        (by_row, (16, 32, 64), shifted, bf16, None, True, {}, None),
        (by_row, (16, 32, 64), same, bf16, bias[1:33], True, {}, False),
        (by_row, (16, 32, 64), same, bf16, bias[::3][:32], True, {}, False),
    ]

    def compare(self, tensors):
        expected = recorded(lambda: self._through_triton(None, tensors))
        kernels.add(self.launch.kernel.fn.__name__)
        if recorded(lambda: ordinary(self, tensors)) != expected:
            failed.append(f"{self.launch.kernel.fn.__name__} {self.grid} {self.scalars}")

    streams, hopper, ada = [3], products.target_for, products.target_of(89, 3)
    triton.runtime.driver.active.get_current_stream = lambda device: streams[-1]
    for case, shape, laid, dtype, added, fast, others, generated in cases:
        a, b, layout = product_operands(*shape, case, laid)
        products.target_for = (lambda device: ada) if "pointers" in others else hopper
        others.pop("pointers", None)
        plan = products.plan_of(a, b, layout, dtype, added, fast, **others)
        out, tensors = torch.empty(shape[:2], dtype=dtype), (a.data, b.data, a.scale, b.scale, added)
        plan._empty = lambda *_, out=out: out
        plan(*tensors)
        launch.PreparedLaunch.__call__ = compare
        plan._run(*tensors)
        launch.PreparedLaunch.__call__ = ordinary
        plan(*tensors)
        is_generated = plan.run != plan._run
        if is_generated != (generated is not False):
            failed.append(f"{case} {shape}: generated {is_generated}")
        if generated:  # others are copied, to other addresses
            through = launch.THROUGH_TRITON.total()
            keys = [recorded(lambda: run(*tensors)) for run in (plan._run, plan.run)]  # noqa: B023
            streams.append(streams[-1] + 1)
            later = recorded(lambda: plan.run(*tensors))  # noqa: B023
            if keys[0] != keys[1] or later[4] != streams[-1] or later[:4] + later[5:] != keys[1][:4] + keys[1][5:]:
                failed.append(f"{case} {shape}: the generated function launches {keys[1]}, not {keys[0]}; then {later}")
            if launch.THROUGH_TRITON.total() != through:
                failed.append(f"{case} {shape}: not direct")
    products.target_for = hopper
    return failed if kernels == {"product_kernel", "promoted_kernel"} else [*failed, f"compared {sorted(kernels)} only"]


def grouped_products_pass_what_triton_passes():
    from octavo.kernels.grouped import triton as products
    from octavo.numerics.spec import QuantSpec
    from octavo.tensor import ScaledTensor

    failed, ordinary = [], launch.PreparedLaunch.__call__

    def compare(self, tensors):
        expected = recorded(lambda: self._through_triton(None, tensors))
        through = launch.THROUGH_TRITON.total()
        if recorded(lambda: ordinary(self, tensors)) != expected or launch.THROUGH_TRITON.total() != through:
            failed.append(f"{self.launch.constants['LAYOUT']} {self.scalars}")

    spec, offsets = QuantSpec.parse("e4m3/row"), torch.tensor([5, 5, 16], dtype=torch.int32)
    for layout, shapes, scales in (  # 19 rows, 3 experts with weights [32,64]
        ("nt", ((19, 64), (96, 64)), ((19, 1), (96, 1))), ("nn", ((19, 32), (96, 64)), ((19, 1), None)),
        ("tn", ((19, 32), (19, 64)), ((3, 32), None)),
    ):  # fmt: skip
        a, b = (
            ScaledTensor(torch.zeros(shape, dtype=spec.format.dtype), None if size is None else torch.ones(size), spec)
            for shape, size in zip(shapes, scales, strict=True)
        )
        for call in (ordinary, compare):
            launch.PreparedLaunch.__call__ = call
            products.grouped_mm(a, b, offsets, layout, torch.bfloat16, None, layout == "nt")
    launch.PreparedLaunch.__call__ = ordinary
    return failed


def linears_launch_as_their_plans():
    """Later passes of a linear, from its plans, launch on X, W and G what the first ones do."""
    import octavo
    from octavo.kernels.gemm import SCALED_MM

    failed, recipes = [], [name for name in octavo.RECIPES if name != "rowwise_equalized"]
    cases = itertools.product(recipes, ((False, {}), (True, {}), (False, {"keep_weights": True})), ("torch_scaled",))
    by_triton = [(recipe, (True, {}), "triton") for recipe in recipes if recipe != "mxfp8"]
    for recipe, (bias, options), backend in (*cases, *by_triton):
        module = torch.nn.Linear(64, 32, bias=bias, dtype=torch.bfloat16)
        layer = octavo.convert(module, recipe, device="cpu", verbose=False, **options)
        with SCALED_MM.force(backend):
            failed += [f"{recipe} {bias} {options} {backend} {problem}" for problem in differing_passes(layer)]
    return failed


def differing_passes(layer):
    """What is wrong with passes of a linear, of which the first ones leave its plans."""
    g, x = torch.zeros(2, 48, 32, dtype=torch.bfloat16), torch.zeros(2, 48, 64, dtype=torch.bfloat16).requires_grad_()
    known, keys = {x.data_ptr(): "x", layer.weight.data_ptr(): "w", g.data_ptr(): "g"}, []
    for _ in range(6):
        through = launch.THROUGH_TRITON.total()
        with DRIVER.recorded() as records:
            layer(x).backward(g)
        # Addresses and hashes of tensor maps are large; those of what a pass allocates differ between passes.
        named = [[known.get(v, "other") if v > 2**40 else v for v in r.key()[5]] for r in records]
        keys.append([(*r.key()[:5], values) for r, values in zip(records, named, strict=True)])
    if any(key != keys[0] for key in keys) or launch.THROUGH_TRITON.total() != through:
        yield "other launches"


def scales_with_gaps_are_copied():
    """Hooks may return saved scales with strides, which kernels do not know: they are copied."""
    import octavo

    failed = []
    g, x = torch.zeros(48, 32, dtype=torch.bfloat16), torch.zeros(48, 64, dtype=torch.bfloat16).requires_grad_()
    layer = octavo.convert(torch.nn.Linear(64, 32, dtype=torch.bfloat16), "rowwise", device="cpu", verbose=False)
    given = []

    def with_gaps(saved):
        if saved.shape != (48, 1):  # of X; the scale of W is passed on as it is, too, where nothing reads it
            return saved
        given.append(torch.zeros(2 * len(saved), 1))
        return given[-1][::2].copy_(saved)

    for _ in range(6):
        given.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, with_gaps):
            y = layer(x)
        with DRIVER.recorded() as records:
            y.backward(g)
        addresses = {value for record in records for value in record.key()[5]}
        if len(given) != 1 or given[0].data_ptr() in addresses:
            failed.append(f"{len(given)} scales with gaps")
    return failed


def promoted_products_launch_their_warps_and_the_loader():
    """Through Triton's launcher, with Gluon's descriptors; the loader's warp takes the place of four."""
    from octavo.kernels.gemm import triton as products
    from octavo.numerics.spec import QuantSpec
    from octavo.tensor import ScaledTensor

    failed, spec = [], QuantSpec.parse("e4m3/tensor")
    operands = [
        ScaledTensor(torch.zeros(*shape, dtype=spec.format.dtype), None, spec) for shape in ((300, 500), (500, 400))
    ]
    for config, threads, tiles in ((0, 384, 3), (4, 256, 3), (5, 256, 3)):
        with DRIVER.recorded() as records:
            products.scaled_mm(*operands, "nn", torch.bfloat16, None, False, config)
        found = [(tuple(record.grid), record.threads) for record in records]
        if found != [((tiles, 1, 1), threads)]:
            failed.append(f"{config}: {found}")
    return failed


def a_cold_start_compiles_few_kernels():
    """Each takes about half a second of one core, before the first step of a run on a machine without a cache."""
    from benchmarks.host.measure import NormedBlock

    import octavo
    from octavo.kernels.adamw import ADAMW, CASE

    compiled = []
    triton.knobs.runtime.jit_cache_hook = lambda key, fn, **_: compiled.append(fn.name)  # also of those in the cache
    block = octavo.convert(NormedBlock(), "rowwise", activations="fp8", device="cpu", verbose=False)
    block(torch.zeros(16, 16, dtype=torch.bfloat16).requires_grad_()).sum().backward()
    counts = {"step": len(compiled)}
    ADAMW.run_probe(ADAMW.backends["triton"], torch.device("cpu"), CASE)  # of outputs that nothing wrote
    counts["probe"] = len(compiled) - counts["step"]
    triton.knobs.runtime.jit_cache_hook = None
    return [] if counts == {"step": 15, "probe": 2} else [f"{counts}: {compiled}"]


if __name__ == "__main__":
    checks = {name: globals()[name] for name in sys.argv[1:]}
    print(json.dumps({name: check() for name, check in checks.items()}))
