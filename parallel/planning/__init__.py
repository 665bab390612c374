"""Time and memory of trainings: from data sheets (`analytic`), or from measurements on these ranks (`measured`)."""
