// What CUDA's halves share. Only for files that nvcc compiles.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace fold3d::kernels::cuda {

/// Throws std::runtime_error if the launch before did not succeed. What a kernel does wrong later shows elsewhere.
inline void check_launched(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("kernel ") + kernel + " was not launched: " + cudaGetErrorString(error));
  }
}

inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace fold3d::kernels::cuda
