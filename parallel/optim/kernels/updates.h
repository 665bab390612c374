/* Optimizer updates of one element of type REAL, whose square root is ROOT.
 *
 * updates.c includes this text once for float and once for double, and NAME adds the type to names. CUDA sources contain
 * it once, and Python reads the names of the arrays. Operations and roundings are those of the formulas with the same
 * names in Python: the bits are the same. */

/* `Scalars` of scalars.py, rounded to REAL. */
typedef struct {
    REAL scale;
    REAL rate;
    REAL decay;
    REAL beta;
    REAL gain1;
    REAL gain2;
    REAL eps;
    REAL root;
    REAL heal;
    REAL pace;
    REAL keep;
} NAME(Scalars);

INLINE REAL NAME(decayed)(REAL step, REAL w, NAME(Scalars) s) { return s.decay != 0 ? step + s.decay * w : step; }

INLINE void NAME(sgd)(REAL *w, REAL gradient, NAME(Scalars) s) {
    *w -= s.rate * NAME(decayed)(s.scale * gradient, *w, s);
}

INLINE void NAME(momentum)(REAL *w, REAL gradient, REAL *velocity, NAME(Scalars) s) {
    *velocity = s.beta * *velocity + NAME(decayed)(s.scale * gradient, *w, s);
    *w -= s.rate * *velocity;
}

INLINE void NAME(nesterov)(REAL *w, REAL gradient, REAL *velocity, NAME(Scalars) s) {
    const REAL g = NAME(decayed)(s.scale * gradient, *w, s), u = s.beta * *velocity + g;
    *velocity = u;
    *w -= s.rate * (g + s.beta * u);
}

INLINE void NAME(moments)(REAL g, REAL *m, REAL *v, NAME(Scalars) s) {
    *m += s.gain1 * (g - *m);
    *v += s.gain2 * (g * g - *v);
}

INLINE REAL NAME(normalized)(REAL m, REAL v, NAME(Scalars) s) { return m / (s.root * ROOT(v) + s.eps); }

INLINE void NAME(adam)(REAL *w, REAL gradient, REAL *m, REAL *v, NAME(Scalars) s) {
    NAME(moments)(NAME(decayed)(s.scale * gradient, *w, s), m, v, s);
    *w = s.keep * *w - s.pace * NAME(normalized)(*m, *v, s);
}

INLINE void NAME(lamb_moments)(REAL gradient, REAL *m, REAL *v, NAME(Scalars) s) {
    NAME(moments)(s.scale * gradient, m, v, s);
}

INLINE void NAME(lamb_direction)(REAL w, REAL m, REAL v, REAL *direction, NAME(Scalars) s) {
    *direction = NAME(decayed)(s.heal * NAME(normalized)(m, v, s), w, s);
}

INLINE void NAME(lamb)(REAL *w, REAL m, REAL v, NAME(Scalars) s) {
    REAL u;
    NAME(lamb_direction)(*w, m, v, &u, s);
    *w -= s.rate * u;
}

INLINE void NAME(average)(REAL w, REAL *ema, NAME(Scalars) s) { *ema = s.keep * *ema + s.gain1 * w; }

#undef REAL
#undef NAME
#undef ROOT
