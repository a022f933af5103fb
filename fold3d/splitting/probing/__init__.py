"""Running blocks of a model by themselves, with stubs in the place of matrix products."""
