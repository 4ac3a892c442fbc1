// The OpenCL functions that the plug-in calls, found in the ICD loader when they are first needed.
//
// Nothing is linked: a machine without OpenCL loads the plug-in and has no device.
#pragma once

#define CL_TARGET_OPENCL_VERSION 120
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include <CL/cl.h>

#include <string>

namespace hybridc::opencl {

// X(name) for every function; the types come out of the header.
#define HYBRIDC_OPENCL_FUNCTIONS(X) \
  X(clGetPlatformIDs)               \
  X(clGetPlatformInfo)              \
  X(clGetDeviceIDs)                 \
  X(clGetDeviceInfo)                \
  X(clCreateContext)                \
  X(clCreateCommandQueue)           \
  X(clReleaseCommandQueue)          \
  X(clCreateBuffer)                 \
  X(clReleaseMemObject)             \
  X(clEnqueueReadBuffer)            \
  X(clEnqueueWriteBuffer)           \
  X(clEnqueueCopyBuffer)            \
  X(clEnqueueNDRangeKernel)         \
  X(clEnqueueMarkerWithWaitList)    \
  X(clEnqueueBarrierWithWaitList)   \
  X(clFinish)                       \
  X(clFlush)                        \
  X(clReleaseEvent)                 \
  X(clGetEventProfilingInfo)        \
  X(clCreateProgramWithSource)      \
  X(clCreateProgramWithBinary)      \
  X(clBuildProgram)                 \
  X(clGetProgramInfo)               \
  X(clGetProgramBuildInfo)          \
  X(clReleaseProgram)               \
  X(clCreateKernel)                 \
  X(clReleaseKernel)                \
  X(clSetKernelArg)

// The functions; all are null where there is no loader.
struct Icd {
#define HYBRIDC_OPENCL_MEMBER(name) decltype(&::name) name = nullptr;
  HYBRIDC_OPENCL_FUNCTIONS(HYBRIDC_OPENCL_MEMBER)
#undef HYBRIDC_OPENCL_MEMBER
  bool found = false;
};

// Loads the ICD loader at the first call. It is never unloaded, since drivers start threads.
const Icd& icd();

// Throws an error of TVM's with the code's name unless `code` is CL_SUCCESS.
void check(cl_int code, const char* call);

// A code as a name, or as a number if it is not a common one.
std::string error_name(cl_int code);

}  // namespace hybridc::opencl

// Calls a function and checks its code.
#define HYBRIDC_OPENCL_CALL(name, ...) \
  ::hybridc::opencl::check(::hybridc::opencl::icd().name(__VA_ARGS__), #name)
