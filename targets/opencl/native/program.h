// Programs: OpenCL C compiled for a device, with a cache of what the driver made of it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "device.h"

namespace hybridc::opencl {

// A kernel. Its arguments are state of the object, so only the holder of the lock may set them and
// enqueue the kernel.
struct Kernel {
  cl_kernel handle = nullptr;
  std::mutex lock;
};

// A program built for one device.
class Program {
 public:
  // Compiles, or takes the binary out of the cache.
  Program(Device& device, const std::string& source);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // The kernel of a name, made at the first call for it.
  Kernel& kernel(const std::string& name);

 private:
  cl_program handle_;
  std::mutex lock_;
  std::unordered_map<std::string, std::unique_ptr<Kernel>> kernels_;
};

}  // namespace hybridc::opencl
