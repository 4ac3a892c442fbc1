#include "program.h"

#include <tvm/ffi/error.h>

#include "cache.h"

namespace hybridc::opencl {

namespace {

constexpr const char* kOptions = "-cl-std=CL1.2";

std::string build_log(Device& device, cl_program program) {
  size_t size = 0;
  cl_device_id id = device.id();
  const Icd& cl = icd();
  if (cl.clGetProgramBuildInfo(program, id, CL_PROGRAM_BUILD_LOG, 0, nullptr, &size)) return "";
  std::string log(size, '\0');
  cl.clGetProgramBuildInfo(program, id, CL_PROGRAM_BUILD_LOG, size, log.data(), nullptr);
  return log.c_str();
}

cl_int build(Device& device, cl_program program) {
  cl_device_id id = device.id();
  return icd().clBuildProgram(program, 1, &id, kOptions, nullptr, nullptr);
}

// A program out of a cached binary; null if the driver does not take it.
cl_program from_binary(Device& device, const std::string& binary) {
  cl_device_id id = device.id();
  size_t size = binary.size();
  auto* bytes = reinterpret_cast<const unsigned char*>(binary.data());
  cl_int status = CL_SUCCESS, code = CL_SUCCESS;
  cl_program program =
      icd().clCreateProgramWithBinary(device.context(), 1, &id, &size, &bytes, &status, &code);
  if (code != CL_SUCCESS) return nullptr;
  if (status == CL_SUCCESS && build(device, program) == CL_SUCCESS) return program;
  icd().clReleaseProgram(program);
  return nullptr;
}

cl_program from_source(Device& device, const std::string& source) {
  const char* text = source.data();
  size_t size = source.size();
  cl_int code = CL_SUCCESS;
  cl_program program =
      icd().clCreateProgramWithSource(device.context(), 1, &text, &size, &code);
  check(code, "clCreateProgramWithSource");
  code = build(device, program);
  if (code == CL_SUCCESS) return program;
  std::string log = build_log(device, program);
  icd().clReleaseProgram(program);
  TVM_FFI_THROW(RuntimeError) << "OpenCL: " << device.text(CL_DEVICE_NAME)
                              << " does not compile the kernels: " << error_name(code) << "\n"
                              << log.substr(0, 4000);
}

// What the driver made of a program; empty if it does not say.
std::string binary_of(cl_program program) {
  size_t size = 0;
  const Icd& cl = icd();
  if (cl.clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof(size), &size, nullptr)) {
    return "";
  }
  std::string binary(size, '\0');
  auto* bytes = reinterpret_cast<unsigned char*>(binary.data());
  if (size == 0 ||
      cl.clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof(bytes), &bytes, nullptr)) {
    return "";
  }
  return binary;
}

cl_program make_program(Device& device, const std::string& source) {
  const std::string key = device.identity() + "\n" + kOptions + "\n" + source;
  const std::string cached = read_cached(key);
  if (!cached.empty()) {
    if (cl_program program = from_binary(device, cached)) return program;
  }
  cl_program program = from_source(device, source);
  write_cached(key, binary_of(program));
  return program;
}

}  // namespace

Program::Program(Device& device, const std::string& source)
    : handle_(make_program(device, source)) {}

Program::~Program() {
  for (auto& entry : kernels_) icd().clReleaseKernel(entry.second->handle);
  icd().clReleaseProgram(handle_);
}

Kernel& Program::kernel(const std::string& name) {
  std::lock_guard<std::mutex> lock(lock_);
  auto found = kernels_.find(name);
  if (found != kernels_.end()) return *found->second;
  cl_int code = CL_SUCCESS;
  auto made = std::make_unique<Kernel>();
  made->handle = icd().clCreateKernel(handle_, name.c_str(), &code);
  check(code, "clCreateKernel");
  return *kernels_.emplace(name, std::move(made)).first->second;
}

}  // namespace hybridc::opencl
