/* Optimizer updates for one type of numbers, REAL: included once for float and once for double, by updates.c.
 *
 * Operations and roundings are those of reference_updates.py: the bits are the same. Scalars are combined in double
 * precision. */

CLONED static double NAME(sgd)(const Argument *a) {
    REAL *restrict w = a[0].data;
    const REAL *restrict gradient = a[1].data;
    const REAL scale = (REAL)a[2].number, rate = (REAL)a[3].number, decay = (REAL)a[4].number;
    const bool decays = a[4].number != 0;
    for (int64_t i = 0; i < a[0].size; i++) {
        REAL g = scale * gradient[i];
        g = decays ? g + decay * w[i] : g;
        w[i] -= rate * g;
    }
    return 0;
}

CLONED static double NAME(momentum)(const Argument *a) {
    REAL *restrict w = a[0].data, *restrict velocity = a[2].data;
    const REAL *restrict gradient = a[1].data;
    const REAL scale = (REAL)a[4].number, rate = (REAL)a[5].number, decay = (REAL)a[6].number, beta = (REAL)a[7].number;
    const bool decays = a[6].number != 0, nesterov = a[3].integer;
    for (int64_t i = 0; i < a[0].size; i++) {
        REAL g = scale * gradient[i];
        g = decays ? g + decay * w[i] : g;
        const REAL u = beta * velocity[i] + g;
        velocity[i] = u;
        w[i] -= rate * (nesterov ? g + beta * u : u);
    }
    return 0;
}

/* Scalars of Adam and LAMB, from `at` on: scale, rate, decay, beta1, beta2, eps, and the corrections 1 - beta^t. */
typedef struct {
    REAL scale, decay, gain1, gain2, root, eps;
    double rate, correction;
} NAME(Moments);

INLINE NAME(Moments) NAME(moments)(const Argument *at) {
    return (NAME(Moments)){
        .scale = (REAL)at[0].number,
        .rate = at[1].number,
        .decay = (REAL)at[2].number,
        .gain1 = (REAL)(1.0 - at[3].number),
        .gain2 = (REAL)(1.0 - at[4].number),
        .eps = (REAL)at[5].number,
        .correction = at[6].number,
        .root = (REAL)(1.0 / sqrt(at[7].number)),
    };
}

/* Adam, with weight decay added to the gradient, or AdamW, whose weights are first multiplied. */
INLINE void NAME(adam_loop)(const Argument *a, bool decoupled) {
    REAL *restrict w = a[0].data, *restrict m = a[2].data, *restrict v = a[3].data;
    const REAL *restrict gradient = a[1].data;
    const NAME(Moments) s = NAME(moments)(a + 4);
    const double decay = a[6].number;
    const REAL pace = (REAL)(s.rate / s.correction), factor = (REAL)(decoupled ? 1.0 - s.rate * decay : 1.0);
    const bool decays = !decoupled && decay != 0;
    for (int64_t i = 0; i < a[0].size; i++) {
        REAL g = s.scale * gradient[i];
        g = decays ? g + s.decay * w[i] : g;
        const REAL first = m[i] + s.gain1 * (g - m[i]), second = v[i] + s.gain2 * (g * g - v[i]);
        m[i] = first;
        v[i] = second;
        w[i] = factor * w[i] - pace * (first / (s.root * ROOT(second) + s.eps));
    }
}

CLONED static double NAME(adam)(const Argument *a) {
    NAME(adam_loop)(a, false);
    return 0;
}

CLONED static double NAME(adamw)(const Argument *a) {
    NAME(adam_loop)(a, true);
    return 0;
}

CLONED static double NAME(lamb_moments)(const Argument *a) {
    REAL *restrict m = a[1].data, *restrict v = a[2].data;
    const REAL *restrict gradient = a[0].data;
    const NAME(Moments) s = NAME(moments)(a + 3);
    for (int64_t i = 0; i < a[0].size; i++) {
        const REAL g = s.scale * gradient[i];
        m[i] += s.gain1 * (g - m[i]);
        v[i] += s.gain2 * (g * g - v[i]);
    }
    return 0;
}

/* LAMB's unscaled step u, written to `out`, or multiplied by the rate and subtracted from the weights. */
INLINE void NAME(lamb_loop)(const Argument *a, const REAL *restrict m, const REAL *restrict v, REAL *restrict out,
                            const Argument *scalars) {
    REAL *w = a[0].data;
    const NAME(Moments) s = NAME(moments)(scalars);
    const REAL heal = (REAL)(1.0 / s.correction), rate = (REAL)s.rate;
    const bool decays = scalars[2].number != 0;
    for (int64_t i = 0; i < a[0].size; i++) {
        REAL u = heal * (m[i] / (s.root * ROOT(v[i]) + s.eps));
        u = decays ? u + s.decay * w[i] : u;
        if (out)
            out[i] = u;
        else
            w[i] -= rate * u;
    }
}

CLONED static double NAME(lamb_direction)(const Argument *a) {
    NAME(lamb_loop)(a, a[1].data, a[2].data, a[3].data, a + 4);
    return 0;
}

CLONED static double NAME(lamb)(const Argument *a) {
    NAME(lamb_loop)(a, a[1].data, a[2].data, NULL, a + 3);
    return 0;
}

CLONED static double NAME(average)(const Argument *a) {
    const REAL *restrict w = a[0].data;
    REAL *restrict ema = a[1].data;
    const REAL keep = (REAL)a[2].number, gain = (REAL)a[3].number;
    for (int64_t i = 0; i < a[0].size; i++)
        ema[i] = keep * ema[i] + gain * w[i];
    return 0;
}

/* Sum of squares of each block, by a pairwise tree in float64. */
CLONED static double NAME(squares)(const Argument *a) {
    const REAL *restrict x = a[0].data;
    double *restrict sums = a[2].data, *restrict out = a[3].data;
    const int64_t block = a[1].integer;
    for (int64_t number = 0; number < a[3].size; number++) {
        const REAL *restrict left = x + number * block, *restrict right = left + block / 2;
        int64_t width = block / 2;
        for (int64_t i = 0; i < width; i++)
            sums[i] = (double)left[i] * (double)left[i] + (double)right[i] * (double)right[i];
        for (width /= 2; width > 0; width /= 2)
            for (int64_t i = 0; i < width; i++)
                sums[i] += sums[width + i];
        out[number] = block > 1 ? sums[0] : (double)left[0] * (double)left[0];
    }
    return 0;
}

#undef REAL
#undef NAME
#undef ROOT
