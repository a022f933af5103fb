# Compiles through ccache where it is installed: a second clone, or a branch and back, compiles nothing twice.
# Needs ROOT, the folder of the clone: paths below it count as relative, so that clones share what they compiled.
CCACHE_COMPILERS := $(firstword $(wildcard /usr/lib/ccache /usr/lib64/ccache))
ifneq ($(CCACHE_COMPILERS),)
export PATH := $(CCACHE_COMPILERS):$(PATH)
export CCACHE_BASEDIR := $(ROOT)
export CCACHE_NOHASHDIR := 1
# The precompiled header of the C++ tests holds macros and a time of its own.
export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime
endif
