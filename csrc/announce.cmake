# Prints what will be compiled (`kernels` and `sources` for `architectures`) and an estimate of the time: to the terminal,
# since pip hides a build's output without -v; without a terminal, as a message.
include(ProcessorCount)
ProcessorCount(cores)
if("$ENV{CMAKE_BUILD_PARALLEL_LEVEL}" GREATER 0 AND "$ENV{CMAKE_BUILD_PARALLEL_LEVEL}" LESS cores)
  set(cores "$ENV{CMAKE_BUILD_PARALLEL_LEVEL}")
endif()

# Seconds of one core (EPYC 7003, nvcc 13.0, g++ 12, 2026-11-22): of a CUDA file per architecture, on average and at most,
# and of a C++ file.
set(kernel_seconds 17)
set(longest_seconds 55)
set(source_seconds 3)

list(LENGTH kernels kernel_count)
list(LENGTH sources source_count)
list(LENGTH architectures architecture_count)
math(EXPR seconds "(${kernel_seconds} * ${kernel_count} * ${architecture_count} + ${source_seconds} * ${source_count}) / ${cores}")
math(EXPR longest "${longest_seconds} * ${architecture_count}")
if(seconds LESS longest)
  set(seconds ${longest})
endif()
math(EXPR minutes "(${seconds} + 59) / 60")
list(JOIN architectures ", " names)
set(line "llmc-cuda: compiles ${kernel_count} CUDA files for compute capabilities ${names} and ${source_count} C++ files")
string(APPEND line ": about ${minutes} min on ${cores} cores")
execute_process(COMMAND sh -c "printf '\\n%s; pip -v shows how far it is\\n' '${line}' > /dev/tty"
                RESULT_VARIABLE no_terminal ERROR_QUIET)
if(no_terminal)
  message(STATUS "${line}")
endif()
