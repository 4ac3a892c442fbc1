#include "icd.h"

#include <dlfcn.h>
#include <tvm/ffi/error.h>

namespace hybridc::opencl {

namespace {

Icd load() {
  Icd functions;
  void* library = nullptr;
  for (const char* name : {"libOpenCL.so.1", "libOpenCL.so"}) {
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
  }
  if (library == nullptr) return functions;
  functions.found = true;
#define HYBRIDC_OPENCL_FIND(name)                                                      \
  functions.name = reinterpret_cast<decltype(functions.name)>(dlsym(library, #name)); \
  functions.found = functions.found && functions.name != nullptr;
  HYBRIDC_OPENCL_FUNCTIONS(HYBRIDC_OPENCL_FIND)
#undef HYBRIDC_OPENCL_FIND
  return functions;
}

}  // namespace

const Icd& icd() {
  static const Icd* functions = new Icd(load());
  return *functions;
}

void check(cl_int code, const char* call) {
  if (code != CL_SUCCESS) {
    TVM_FFI_THROW(RuntimeError) << "OpenCL: " << call << " failed with " << error_name(code);
  }
}

std::string error_name(cl_int code) {
  switch (code) {
#define HYBRIDC_OPENCL_NAME(name) \
  case name:                      \
    return #name;
    HYBRIDC_OPENCL_NAME(CL_DEVICE_NOT_FOUND)
    HYBRIDC_OPENCL_NAME(CL_DEVICE_NOT_AVAILABLE)
    HYBRIDC_OPENCL_NAME(CL_COMPILER_NOT_AVAILABLE)
    HYBRIDC_OPENCL_NAME(CL_MEM_OBJECT_ALLOCATION_FAILURE)
    HYBRIDC_OPENCL_NAME(CL_OUT_OF_RESOURCES)
    HYBRIDC_OPENCL_NAME(CL_OUT_OF_HOST_MEMORY)
    HYBRIDC_OPENCL_NAME(CL_BUILD_PROGRAM_FAILURE)
    HYBRIDC_OPENCL_NAME(CL_INVALID_VALUE)
    HYBRIDC_OPENCL_NAME(CL_INVALID_MEM_OBJECT)
    HYBRIDC_OPENCL_NAME(CL_INVALID_BINARY)
    HYBRIDC_OPENCL_NAME(CL_INVALID_KERNEL_NAME)
    HYBRIDC_OPENCL_NAME(CL_INVALID_KERNEL_ARGS)
    HYBRIDC_OPENCL_NAME(CL_INVALID_ARG_INDEX)
    HYBRIDC_OPENCL_NAME(CL_INVALID_ARG_SIZE)
    HYBRIDC_OPENCL_NAME(CL_INVALID_WORK_GROUP_SIZE)
    HYBRIDC_OPENCL_NAME(CL_INVALID_WORK_ITEM_SIZE)
    HYBRIDC_OPENCL_NAME(CL_INVALID_BUFFER_SIZE)
    HYBRIDC_OPENCL_NAME(CL_INVALID_GLOBAL_WORK_SIZE)
#undef HYBRIDC_OPENCL_NAME
    default:
      return "error " + std::to_string(code);
  }
}

}  // namespace hybridc::opencl
